"""Autoscaling: the number of nodes of each type."""
