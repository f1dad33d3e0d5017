"""Baseline policies: policies published for other systems, and simple ones for comparison."""
