"""Implementation of the ``goodput`` policy."""
