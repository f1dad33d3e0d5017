"""Current strategy of a model in training, and the switch to another strategy (torch)."""
