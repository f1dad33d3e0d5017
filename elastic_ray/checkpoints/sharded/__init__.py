"""Automatic checkpoints to which each rank writes its own part, readable by any number of ranks."""
