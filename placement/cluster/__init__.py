"""Cluster model: nodes and jobs."""
