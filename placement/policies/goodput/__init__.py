"""The policy ``goodput``."""
