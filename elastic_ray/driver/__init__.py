"""What a user's script holds of a job: the trainer, its checks, the handle and the display."""
