"""The last of many numbered things: bounded memory, constant time for each (pure)."""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

T = TypeVar("T")

MOST = 1000


class BoundedLog(Generic[T]):
    """Log of the last numbered items.

    Numbers grow by one, but for this: they may come in another order, and a restart goes back and repeats some.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._things: dict[int, T] = {}
        self.low = 0  # below it nothing is kept
        self._full = False
        self.first = 0  # smallest number that there ever was; 0 before the first
        self.last = 0  # largest one

    def __contains__(self, number: int) -> bool:
        return number in self._things

    def get(self, number: int) -> T | None:
        """Return the item of this number; None if there is none (any more)."""
        return self._things.get(number)

    def gone(self, number: int) -> bool:
        """True if items of this number are no longer kept."""
        return self._full and number < self.low

    def put(self, number: int, thing: T) -> None:
        """Keep a thing, in place of an earlier one of its number."""
        self.first = min(self.first or number, number)
        if self.gone(number):
            return
        if not self._full:
            self.low = self.first
        self._things[number] = thing
        self.last = max(self.last, number)
        while len(self._things) > self._most:
            self._full = True
            self._things.pop(self.low, None)
            self.low += 1

    def began_with(self, number: int) -> None:
        """Set the number of the first item, which is not kept."""
        self.first = number

    def values(self) -> tuple[T, ...]:
        """Return the kept items, by number."""
        return tuple(self._things[number] for number in sorted(self._things))


_MOST_LINES = 20_000


class Backlog:
    """Lines that wait to be written; of too many, the oldest are dropped, and counted."""

    def __init__(self, most: int = _MOST_LINES) -> None:
        self._most = most
        self._lines: collections.deque[str] = collections.deque()
        self._taken = 0  # of the first lines: they are being written
        self.dropped = 0  # lines that had to go since that was last told

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, line: str) -> bool:
        return line in self._lines

    def add(self, line: str) -> None:
        """Add a line; too many drop the oldest."""
        self._lines.append(line)
        if len(self._lines) - self._taken > self._most:
            del self._lines[self._taken]
            self.dropped += 1

    def tell_dropped(self) -> int:
        """Return the number of lines dropped since the last call."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def take(self) -> tuple[str, ...]:
        """Return the lines to write now; either :meth:`written` or :meth:`failed` follows before the next call."""
        assert not self._taken, "lines are being written"
        self._taken = len(self._lines)
        return tuple(self._lines)

    def written(self) -> None:
        """Drop the taken lines, which are in the file."""
        for _ in range(self._taken):
            self._lines.popleft()
        self._taken = 0

    def failed(self) -> None:
        """Keep the lines, which could not be written."""
        self._taken = 0
        while len(self._lines) > self._most:
            self._lines.popleft()
            self.dropped += 1
