"""The clusters that are simulated, and what becomes of their nodes."""
