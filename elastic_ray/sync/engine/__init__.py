"""Gradient synchronisation during training: buckets filled during backward, and their reductions."""
