"""Goodput: how fast a job runs on given resources, and what that is worth."""
