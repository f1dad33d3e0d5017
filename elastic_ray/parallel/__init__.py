"""Replicated training on a group that may change: gradients, optimizer steps, and the state that is transferred."""
