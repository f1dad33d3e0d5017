"""Engine that makes the gradients of one model equal on all ranks at each step (torch)."""
