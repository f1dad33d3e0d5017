"""What ranks compare, and how they tell each other apart."""
