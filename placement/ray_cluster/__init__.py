"""Interface to Ray's view of the cluster, and requests for nodes."""
