"""Shared parts of policies: the protocol, admission of jobs, growth beyond the minimum, and placement on nodes."""
