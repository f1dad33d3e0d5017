"""What a simulation has shown."""
