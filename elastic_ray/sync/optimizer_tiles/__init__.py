"""Optimizer state in tiles, each of which lies with some of the ranks."""
