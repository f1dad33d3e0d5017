"""Error for invalid input."""

from __future__ import annotations


class InputError(ValueError):
    """Error raised for an invalid trace, profile, price table, cluster file or option.

    The message names the place and what would be valid.
    """
