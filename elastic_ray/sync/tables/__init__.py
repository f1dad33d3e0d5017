"""Embedding tables whose touched rows are exchanged in place of their whole gradient."""
