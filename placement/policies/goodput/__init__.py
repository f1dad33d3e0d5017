"""Implementation of the policy ``goodput``."""
