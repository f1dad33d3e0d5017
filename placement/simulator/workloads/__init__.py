"""Simulated jobs: traces, and profiles of their speeds and lengths."""
