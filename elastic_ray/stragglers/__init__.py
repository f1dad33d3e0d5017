"""Stragglers: detection of slow workers and of the cause, smaller shares for them, and their replacement."""
