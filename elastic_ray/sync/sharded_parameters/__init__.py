"""Sharded parameters (torch's ``fully_shard``) for changing groups: shards move while training continues."""
