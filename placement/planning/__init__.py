"""Planning of one decision, from jobs to nodes: a policy's answer subject to a cluster's constraints."""
