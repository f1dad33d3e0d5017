"""Stragglers: slow workers of a group, the causes, their relief, and their replacement."""
