"""Gradient synchronisation during training: buckets that are filled during backward, and their reductions."""
