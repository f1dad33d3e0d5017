"""Simulated jobs: traces, and their speeds and lengths."""
