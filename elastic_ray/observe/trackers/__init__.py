"""Trackers that export a run: TensorBoard, and the callbacks of Ray Train and Ray Tune."""
