"""Automatic checkpoints in which each rank writes its own part, readable by any number of ranks."""
