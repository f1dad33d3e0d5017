"""Goodput: how fast a job makes progress on given resources."""
