"""Nodes of simulated clusters, and what happens to them."""
