"""Stragglers: which workers of a group are slow, why, what they are relieved of, and when one is to be replaced."""
