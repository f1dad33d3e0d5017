"""Data-parallel training in a group that may change: gradients, optimizer steps, and state for new workers."""
