"""Baseline policies: published policies of other systems, and simple ones for comparison."""
