"""Ranks that step with gradients of their own, and how their models are brought together."""
