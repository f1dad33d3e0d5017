"""Embedding tables that exchange only their touched rows instead of the entire gradient."""
