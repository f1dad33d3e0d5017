"""Automatic checkpoints that all ranks write, each its part, and that any number of ranks reads."""
