"""Sharded parameters (torch's ``fully_shard``) in changing groups: shards move while training continues."""
