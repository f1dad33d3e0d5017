"""A worker's process: the user's train function, and the way to the job's controller."""
