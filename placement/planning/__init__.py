"""Planning of one decision, from jobs to nodes: a policy's answer within the constraints of clusters."""
