"""Commands that show the state of jobs and cluster."""
