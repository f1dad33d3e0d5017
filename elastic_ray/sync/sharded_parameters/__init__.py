"""How a model's parameters lie with the ranks of a group that may change: torch's ``fully_shard``, resized live."""
