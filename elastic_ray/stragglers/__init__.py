"""Stragglers: detection of slow workers and its causes, smaller shares for them, and their replacement."""
