"""Workers of a job as one group: how they are started, monitored, lost, and adopted by a restarted controller."""
