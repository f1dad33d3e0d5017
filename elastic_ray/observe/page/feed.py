"""Stream of changes for browsers, each with a bounded queue; a browser that does not read is dropped (pure)."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

from elastic_ray.observe.page.model import PageSnapshot

KEYS: Mapping[str, str | int] = {
    "jobs": "job",
    "nodes": "node",
    "decisions": "number",
    "tenants": "tenant",
    "wanted": "type",
    "bars": 0,
    "marks": 0,
    "use": 0,
}
"""Tables of the snapshot, and what tells their rows apart: a field, or the place in an array."""

_AS_THEY_ARE = frozenset((str, int, bool))
_BIG = 1e5  # above: seconds since the epoch, of which hundredths count


def tables(snapshot: PageSnapshot) -> dict[str, Any]:
    """Return a page snapshot's fields as values that JSON can hold, keyed by field name."""
    return {name: plain(getattr(snapshot, name)) for name in _names(PageSnapshot)}


def plain(value: Any) -> Any:
    """Return a value as plain JSON: numbers with five digits, times with two decimals, None for NaN and infinity."""
    kind = value.__class__
    if value is None or kind in _AS_THEY_ARE:
        return value
    if kind is float:
        return _rounded(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _names(value.__class__)}
    try:
        return _rounded(float(value))  # of NumPy or torch
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return str(value)


def _rounded(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return round(value, 2) if abs(value) >= _BIG else float(f"{value:.5g}")


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes from one result of :func:`tables` to the next, keyed by field; empty if only time passed.

    A changed table is ``{"set": [new or changed rows], "remove": [keys]}``; any other entry is its new value.
    """
    changed: dict[str, Any] = {}
    for name, value in after.items():
        if name == "time_s" or value == before.get(name):
            continue
        key = KEYS.get(name)
        if key is None:
            changed[name] = value
            continue
        old = {row[key]: row for row in before.get(name, ())}
        new = {row[key]: row for row in value}
        changed[name] = {
            "set": [row for each, row in new.items() if old.get(each) != row],
            "remove": [each for each in old if each not in new],
        }
    return changed


def to_json(value: Any) -> bytes:
    """Return ``value`` as compact ASCII JSON, without characters that could break a line in an event stream."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


MOST_CLIENTS = 32
MOST_WAITING = 64
MOST_WAITING_BYTES = 8 << 20


class TooManyClientsError(Exception):
    """Error raised if the maximum number of browsers already has the page open."""


class Client:
    """Queue of messages for one browser that has the page open."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._dropped = asyncio.Event()

    @property
    def dropped(self) -> bool:
        """True if the client was dropped because it did not read its messages."""
        return self._dropped.is_set()

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes queued for the client."""
        return self._bytes

    def offer(self, message: bytes) -> bool:
        """Queue a message and return True; if the queue is full, drop the client and return False."""
        full = self._messages.qsize() >= self._most or self._bytes + len(message) > self._most_bytes
        if full or self.dropped:
            self.drop()
            return False
        self._bytes += len(message)
        self._messages.put_nowait(message)
        return True

    def start(self, message: bytes) -> None:
        """Queue the first message, regardless of its size."""
        self._bytes += len(message)
        self._most_bytes += len(message)
        self._messages.put_nowait(message)

    def drop(self) -> None:
        """Drop the client and discard its queued messages."""
        self._dropped.set()
        while not self._messages.empty():
            self._messages.get_nowait()
        self._bytes = 0
        self._messages.put_nowait(None)

    async def next(self, timeout_s: float) -> bytes | None:
        """Return the next message; b"" if none arrives within ``timeout_s`` [s], None if the client was dropped."""
        try:
            message = await asyncio.wait_for(self._messages.get(), timeout_s)
        except asyncio.TimeoutError:
            return b""
        if message is not None:
            self._bytes -= len(message)
        return message

    async def until_dropped(self) -> None:
        """Wait until the client is dropped (disconnected by the server)."""
        await self._dropped.wait()


class Feed:
    """Feed of messages to all browsers that have the page open."""

    def __init__(
        self, most_clients: int = MOST_CLIENTS, most_waiting: int = MOST_WAITING, most_bytes: int = MOST_WAITING_BYTES
    ) -> None:
        self._most_clients, self._most_waiting, self._most_bytes = most_clients, most_waiting, most_bytes
        self._clients: set[Client] = set()

    @property
    def clients(self) -> int:
        """Number of connected browsers."""
        return len(self._clients)

    def join(self) -> Client:
        """Add a browser to the feed and return its queue. Raises TooManyClientsError if it is full."""
        if len(self._clients) >= self._most_clients:
            raise TooManyClientsError(f"{self._most_clients} browsers have this page open already; close one")
        client = Client(self._most_waiting, self._most_bytes)
        self._clients.add(client)
        return client

    def leave(self, client: Client) -> None:
        """Remove a browser, represented by its queue ``client``, from the feed."""
        self._clients.discard(client)

    def notify(self, message: bytes) -> None:
        """Send a message to all clients; a client whose queue is full is dropped."""
        for client in tuple(self._clients):
            if not client.offer(message):
                self._clients.discard(client)

    def close(self) -> None:
        """Drop all clients, because the page is shutting down."""
        for client in tuple(self._clients):
            client.drop()
        self._clients.clear()
