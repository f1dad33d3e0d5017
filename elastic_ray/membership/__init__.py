"""Membership of a job: its workers, and how one group of workers replaces another between two steps."""
