"""Stream of changes to browsers, each with a bounded queue; a browser that does not read is dropped (pure)."""

from __future__ import annotations

import asyncio

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
        """Return the next message; b"" if none comes within ``timeout_s`` [s], None if the client was dropped."""
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
        """Add a browser to the feed and return its queue. Raises TooManyClientsError: the maximum is connected."""
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
