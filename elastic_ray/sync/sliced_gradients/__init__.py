"""Gradients whose mean each rank receives only for the parts whose optimizer state it owns (ZeRO-2)."""
