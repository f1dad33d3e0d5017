"""The one error for input that makes no sense."""

from __future__ import annotations


class InputError(ValueError):
    """A trace, a profile, a table of prices, a cluster file or an option makes no sense.

    The message says where and what is right.
    """
