"""Warm processes, which have imported everything before a job needs them."""
