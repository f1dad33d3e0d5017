"""Sessions without a trainer: a single process, or the fixed group of processes that a launcher started."""
