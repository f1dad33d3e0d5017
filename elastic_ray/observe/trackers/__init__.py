"""Trackers that export a run's numbers to TensorBoard and to the callbacks of Ray Train and Ray Tune."""
