"""Processes that have imported everything before a job needs them."""
