"""How many nodes of which type there should be."""
