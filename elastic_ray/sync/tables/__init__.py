"""Embedding tables of which only the touched rows are exchanged, and not the whole gradient."""
