"""What operators see of jobs and of the cluster."""
