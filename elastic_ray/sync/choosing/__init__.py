"""Selection of the fastest strategy by measurement: candidates, the race between them, and the choice."""
