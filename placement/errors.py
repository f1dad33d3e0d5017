"""Error of invalid input."""

from __future__ import annotations


class InputError(ValueError):
    """Error raised for an invalid trace, profile, table of prices, cluster file or option.

    The message says where and what is right.
    """
