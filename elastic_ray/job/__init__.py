"""Shells: the detached job controller, the worker actor, warm workers."""
