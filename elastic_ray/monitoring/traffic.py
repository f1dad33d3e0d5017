"""Bytes that a process hands to the collectives of its group, counted where they are started (pure)."""

from __future__ import annotations

OPERATIONS = ("all_reduce", "all_gather", "all_to_all", "reduce", "broadcast", "send")
"""What is counted apart."""


class Traffic:
    """See the module's text. Of a broadcast only the root hands something over, of an all-gather each its own part.

    Attributes:
        bytes: by operation, since the group was formed; to be read only.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = dict.fromkeys(OPERATIONS, 0)

    def add(self, operation: str, count: int) -> None:
        """So many bytes go into an operation of ``OPERATIONS``."""
        self.bytes[operation] += count
