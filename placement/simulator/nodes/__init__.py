"""Nodes of simulated clusters, and the events that affect them."""
