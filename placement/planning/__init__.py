"""One decision, from jobs to nodes: a policy's answer within what clusters ask for."""
