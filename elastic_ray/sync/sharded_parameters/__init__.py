"""Parameters of torch's ``fully_shard`` in a group that may change: shards are moved while training continues."""
