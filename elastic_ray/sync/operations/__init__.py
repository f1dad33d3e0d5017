"""What is done with the gradients of a bucket, so that all ranks hold their mean (torch)."""
