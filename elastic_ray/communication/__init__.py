"""Communication of one generation's ranks: how they find each other and exchange messages."""
