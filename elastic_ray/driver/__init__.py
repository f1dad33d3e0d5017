"""Driver side of a job: the trainer and its argument checks, the job handle and the progress display."""
