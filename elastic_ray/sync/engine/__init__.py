"""How the gradients of one model become the same on all ranks, step by step (torch)."""
