"""What people see of jobs and of the cluster: a page, and the trackers of a run."""
