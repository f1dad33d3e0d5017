"""Driver's side of a job: the trainer, its checks, the handle and the display."""
