"""Replicas that train on their local gradients, and algorithms that average their models."""
