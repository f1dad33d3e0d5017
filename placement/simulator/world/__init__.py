"""The simulated world: by which rules time passes and jobs move, and what is true at a moment."""
