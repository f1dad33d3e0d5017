"""Statistics of one model's gradients, taken inside the reductions that there are."""
