"""Sessions without a trainer: one process alone, or the fixed group that a launcher started."""
