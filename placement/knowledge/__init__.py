"""Knowledge that jobs of one model share, kept after they end."""
