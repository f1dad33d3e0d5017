"""Gradients of which each rank receives only the mean of the parts whose optimizer state it owns (ZeRO-2)."""
