"""Statistics of one model's gradients, measured during reductions that are needed anyway."""
