"""What Ray says about the cluster, and what it is asked for."""
