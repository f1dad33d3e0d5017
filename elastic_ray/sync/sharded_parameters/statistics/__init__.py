"""What is measured of the gradients of a sharded model."""
