"""Which connections a page has, and which go, so that none takes the place of those who ask something (pure).

A connection waits while it has sent no whole request; a process that opens many, and sends nothing, or a byte now and
then, holds their descriptors. Those that wait go after a while, and sooner where there are too many; never one whose
request is being answered, unless there are as many of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

MOST = 256
MOST_OF_ONE = 128  # all processes of this machine are one peer
LONGEST_WAIT_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Connection:
    peer: str
    since_s: float
    asks: int = 0  # requests that are being answered


class Doors:
    """All connections of a page, the oldest first.

    Args:
        most: how many there may be.
        most_of_one: how many one address may have.
    """

    def __init__(self, most: int = MOST, most_of_one: int = MOST_OF_ONE) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._connections: dict[Hashable, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def open(self, key: Hashable, peer: str, now_s: float) -> Hashable | None:
        """Add a connection; return the one that has to go for it, which may be itself."""
        of_peer = [each for each, one in self._connections.items() if one.peer == peer]
        self._connections[key] = _Connection(peer, now_s)
        if len(of_peer) >= self._most_of_one:
            return self._longest_waiting([*of_peer, key])
        if len(self._connections) > self._most:
            return self._longest_waiting(list(self._connections))
        return None

    def close(self, key: Hashable) -> None:
        """A connection has ended."""
        self._connections.pop(key, None)

    def begin(self, key: Hashable) -> None:
        """A whole request has come."""
        if (one := self._connections.get(key)) is not None:
            self._connections[key] = dataclasses.replace(one, asks=one.asks + 1)

    def end(self, key: Hashable, now_s: float) -> None:
        """It has been answered."""
        if (one := self._connections.get(key)) is not None:
            self._connections[key] = dataclasses.replace(one, asks=one.asks - 1, since_s=now_s)

    def late(self, now_s: float) -> list[Hashable]:
        """Return connections that have waited too long."""
        return [key for key, one in self._connections.items() if not one.asks and now_s - one.since_s >= LONGEST_WAIT_S]

    def _longest_waiting(self, keys: list[Hashable]) -> Hashable:
        waiting = [key for key in keys if not self._connections[key].asks]  # the new one at least
        leaves = min(waiting, key=lambda key: self._connections[key].since_s)
        del self._connections[leaves]
        return leaves
