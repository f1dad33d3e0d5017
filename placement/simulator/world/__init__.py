"""Simulated world: rules for time and for moving jobs, and the true state at every moment."""
