"""Communication between the ranks in a generation: how they connect and exchange messages."""
