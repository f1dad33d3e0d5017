"""Steps on this rank: the step in progress, step times, and which steps count."""
