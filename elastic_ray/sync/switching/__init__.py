"""The strategy of a model that trains: which is in force, which comes next, and who says so (torch)."""
