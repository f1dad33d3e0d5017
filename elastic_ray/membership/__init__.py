"""Membership of a job: its workers, and how one group of them replaces another between two steps."""
