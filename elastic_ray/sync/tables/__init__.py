"""Gradients of tables of which a step touches few rows (torch)."""
