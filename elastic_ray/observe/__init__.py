"""What others see of a run: the trackers that its user looks at."""
