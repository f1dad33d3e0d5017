"""Knowledge that jobs of the same model share, kept after the jobs end."""
