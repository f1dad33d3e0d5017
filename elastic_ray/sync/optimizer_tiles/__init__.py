"""Optimizer state divided into tiles, whose owners publish the parameters that they update."""
