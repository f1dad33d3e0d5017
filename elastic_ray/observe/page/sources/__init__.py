"""Data sources of the page: a running cluster, the files of runs, or a simulator report."""
