"""Strategy of a model in training: the current one, and the switch to the next (torch)."""
