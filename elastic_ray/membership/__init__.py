"""Who belongs to a job, and how a group of workers turns into the next one between two steps."""
