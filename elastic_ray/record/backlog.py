"""Lines that are to be written some time, in order, while storage may be away (pure)."""

from __future__ import annotations

import collections

_MOST_LINES = 20_000


class Backlog:
    """Lines stay until they are written; of too many, the oldest go, and are counted.

    Args:
        most: how many are kept.

    Attributes:
        dropped: lines that had to go since that was last told.
    """

    def __init__(self, most: int = _MOST_LINES) -> None:
        self._most = most
        self._lines: collections.deque[str] = collections.deque()
        self._taken = 0  # of the first lines: they are being written
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, line: str) -> bool:
        return line in self._lines

    def add(self, line: str) -> None:
        """Another line."""
        self._lines.append(line)
        if len(self._lines) - self._taken > self._most:
            del self._lines[self._taken]
            self.dropped += 1

    def tell_dropped(self) -> int:
        """Lines that had to go since this was last asked."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def take(self) -> tuple[str, ...]:
        """What is to be written now; either :meth:`written` or :meth:`failed` follows before the next time."""
        assert not self._taken, "lines are being written"
        self._taken = len(self._lines)
        return tuple(self._lines)

    def written(self) -> None:
        """The lines that were taken are in the file."""
        for _ in range(self._taken):
            self._lines.popleft()
        self._taken = 0

    def failed(self) -> None:
        """They are not."""
        self._taken = 0
        while len(self._lines) > self._most:
            self._lines.popleft()
            self.dropped += 1
