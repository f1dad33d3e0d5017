"""Planning of one decision, from jobs to nodes: the policy's answer, subject to the cluster's constraints."""
