"""Gradients of which each rank receives the mean of some parts only: those whose optimizer state it owns."""
