"""Automatic checkpoints that consist of one part per rank, readable by any number of ranks."""
