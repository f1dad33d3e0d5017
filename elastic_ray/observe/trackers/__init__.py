"""A run in its user's trackers: TensorBoard, and the callbacks of Ray Train and Ray Tune."""
