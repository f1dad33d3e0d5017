"""Embedding tables with rows divided among the ranks."""
