"""Statistics of one model's gradients, measured during reductions that take place anyway."""
