"""Optimizer state divided into tiles, whose owners send updated parameters to all ranks."""
