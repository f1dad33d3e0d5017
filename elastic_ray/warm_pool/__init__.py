"""Warm processes, which have imported torch and other modules before a job needs them."""
