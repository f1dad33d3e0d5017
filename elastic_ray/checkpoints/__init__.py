"""What a run leaves on storage: its directory, automatic checkpoints, and which are kept."""
