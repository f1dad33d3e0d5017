"""Goodput: the rate at which a job makes training progress on given resources."""
