"""How the parameters of a model lie with the ranks of a group, which may change: torch's ``fully_shard``, resized live."""
