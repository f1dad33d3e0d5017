"""Communication between the ranks of one generation: how they connect and exchange messages."""
