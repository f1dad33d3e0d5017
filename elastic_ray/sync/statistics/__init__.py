"""Statistics of one model's gradients, measured within existing reductions."""
