"""The simulator's one error for bad input."""

from __future__ import annotations


class InputError(ValueError):
    """A trace, a profile, a cluster string or an option makes no sense; the message says where and what is right."""
