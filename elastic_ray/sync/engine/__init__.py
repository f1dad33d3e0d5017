"""Gradient synchronisation during training: buckets that backward fills, and their reductions."""
