"""Replicas that train on their local gradients, and the algorithms that average their models."""
