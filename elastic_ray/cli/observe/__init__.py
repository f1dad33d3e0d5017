"""Commands that show the state of jobs and of the cluster."""
