"""What can be told of a dataset without loading a sample."""
