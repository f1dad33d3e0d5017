"""Sharded parameters (torch's ``fully_shard``) in a group that may change: shards move while training continues."""
