"""What jobs of one model learn from each other, kept beyond their ends."""
