"""Membership of a job, and the change from one group of workers to the next between two steps."""
