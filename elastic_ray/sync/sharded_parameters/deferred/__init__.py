"""Models that are built without memory: initialised when it is known which rows a rank holds (torch)."""
