"""Storage of a run: its directory, automatic checkpoints, and their retention."""
