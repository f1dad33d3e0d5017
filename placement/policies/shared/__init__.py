"""Shared parts of policies: the protocol, the admission of jobs, the growth of sizes, and placement on nodes."""
