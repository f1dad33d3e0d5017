"""Strategy of a model in training: the one in force, and the change to the next (torch)."""
