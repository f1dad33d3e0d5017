"""Embedding tables whose rows are divided among the ranks."""
