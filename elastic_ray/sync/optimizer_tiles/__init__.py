"""Optimizer state that is divided into tiles, whose owners send updated parameters to all ranks."""
