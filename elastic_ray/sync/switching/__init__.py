"""Current strategy of a model during training, and the switch to another strategy (torch)."""
