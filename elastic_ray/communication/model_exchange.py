"""SHELL over TCP: exchange of models: ranks pull each other's newest models without waiting for them."""

from __future__ import annotations

import json
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.communication.rank_server import TOKEN_BYTES, RankServer, shut

_QUESTION = struct.Struct("!QQ")  # digest of what is exchanged, and the version that the caller has
_ANSWER = struct.Struct("!Qd")  # the version that comes, 0 for none that is newer, and its age [s]
_LOOK_S = 1.0  # between two looks whether the group is still wanted
_CHUNK = 1 << 20


class _Published(RankServer):
    """Server of this rank's newest model: written to one of two buffers while the other one may be read."""

    def __init__(self, host: str, token: bytes, callers: int) -> None:
        self._buffers: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._readers, self._versions, self._layouts, self._newest = [0, 0], [0, 0], [0, 0], 0
        self._times_s = [0.0, 0.0]
        super().__init__(host, token, callers, "published-model")

    def publish(self, layout: int, parts: Sequence[torch.Tensor], now_s: float) -> None:
        """Copy the model; keep the previous one if the other buffer is still being sent."""
        with self._lock:
            spare = 1 - self._newest
            if self._readers[spare]:
                return
            self._versions[spare] = 0  # nobody begins to read it
        into = self._buffers[spare]
        if self._layouts[spare] != layout:
            into[:] = [torch.empty_like(part, device="cpu") for part in parts]
        for mine, part in zip(into, parts, strict=True):
            mine.copy_(part)
        finite = all(mine.mul(0.0).sum().item() == 0.0 for mine in into)  # in fewer passes than isfinite makes
        with self._lock:
            self._layouts[spare], self._times_s[spare] = layout, now_s
            if finite:
                self._versions[spare], self._newest = max(self._versions) + 1, spare

    def held(self, layout: int) -> list[tuple[float, list[torch.Tensor]]]:
        """Return the models that are held (at most two), each with the time of its publication."""
        return [
            (self._times_s[each], self._buffers[each])
            for each in (0, 1)
            if self._versions[each] and self._layouts[each] == layout
        ]

    def answer(self, caller: socket.socket) -> None:
        """Send the newest model whenever it is newer than the caller's."""
        with caller.makefile("rb") as stream:
            while len(question := stream.read(_QUESTION.size)) == _QUESTION.size:
                layout, known = _QUESTION.unpack(question)
                with self._lock:
                    which, version = self._newest, self._versions[self._newest]
                    age_s = time.monotonic() - self._times_s[which]
                    if version <= known or self._layouts[which] != layout:
                        version = 0
                    self._readers[which] += version > 0
                try:
                    caller.sendall(_ANSWER.pack(version, age_s))
                    for part in self._buffers[which] if version else ():
                        caller.sendall(_bytes_of(part))
                finally:
                    with self._lock:
                        self._readers[which] -= version > 0


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    content: Any = tensor.view(torch.uint8).numpy()
    return memoryview(content)


class _Pulls:
    """A rank's connections to the other ranks of one group, and the thread that pulls their models.

    A pull that is in progress when the group is left ends with this object's connections; no later group sees it.
    """

    def __init__(self, communicator: Communicator, token: bytes, called_off: Callable[[], bool]) -> None:
        self.peers: dict[int, tuple[str, int]] = {}
        self._token, self._timeout_s, self._called_off = token, communicator.timeout_s, called_off
        self._sockets, self._versions, self._ended = dict[int, socket.socket](), dict[int, int](), False
        self._lock, self._choice = threading.Lock(), random.Random(communicator.rank)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="published-model")

    def close(self) -> None:
        """Leave the group; a pull in progress fails at once."""
        with self._lock:
            self._ended = True
            sockets = list(self._sockets.values())
        for each in sockets:
            shut(each)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def start(self, layout: int, into: Sequence[torch.Tensor]) -> Future[float | None] | None:
        """Pull a random rank's newest model; return None if no rank is left to ask."""
        peers = list(self.peers)
        return self._thread.submit(self._pull, self._choice.choice(peers), layout, into) if peers else None

    def _pull(self, peer: int, layout: int, into: Sequence[torch.Tensor]) -> float | None:
        """Pull a rank's model; return when it was published [s], None if it is no newer. A failing rank is left out."""
        try:
            connection = self._connection(peer)
            asked_s = time.monotonic()
            connection.sendall(_QUESTION.pack(layout, self._versions.get(peer, 0)))
            head = bytearray(_ANSWER.size)
            self._read(connection, memoryview(head))
            version, age_s = _ANSWER.unpack(head)
            answered_s = (asked_s + time.monotonic()) / 2  # half of the way there and back before the answer came
            for part in into if version else ():
                self._read(connection, _bytes_of(part))
        except OSError:
            self.peers.pop(peer, None)
            with self._lock:
                failed = self._sockets.pop(peer, None)
            if failed is not None:
                shut(failed)
            return None
        self._versions[peer] = max(self._versions.get(peer, 0), int(version))
        return float(answered_s - age_s) if version else None

    def _connection(self, peer: int) -> socket.socket:
        """Return the connection to a rank. Raises OSError if it cannot be made, or the group was left."""
        if (connection := self._sockets.get(peer)) is None:
            connection = socket.create_connection(self.peers[peer], timeout=self._timeout_s)
            with self._lock:
                if self._ended:
                    connection.close()
                    raise ConnectionError("the group was left")
                self._sockets[peer] = connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_LOOK_S)
            connection.sendall(self._token)
        return connection

    def _read(self, connection: socket.socket, into: memoryview) -> None:
        """Fill the memory. Raises OSError if the rank is gone or silent, or the group was left or called off."""
        done, until_s = 0, time.monotonic() + self._timeout_s
        while done < len(into):
            try:
                count = connection.recv_into(into[done : done + _CHUNK])
            except TimeoutError:
                if self._ended or self._called_off() or time.monotonic() > until_s:
                    raise
                continue
            if not count:
                raise ConnectionError("the rank is gone")
            done, until_s = done + count, time.monotonic() + self._timeout_s


class ModelExchange:
    """Published model of this rank, with a background thread that pulls models from random other ranks."""

    def __init__(self) -> None:
        self._server: _Published | None = None
        self._pulls: _Pulls | None = None
        self._pulled: Future[float | None] | None = None
        self._into: Sequence[torch.Tensor] = ()  # tensors of the pull in progress

    def enter(self, communicator: Communicator, *, called_off: Callable[[], bool]) -> None:
        """Join a group's model exchange; called on every rank. Raises CommunicationFailedError if the group broke."""
        self.close()
        rank, ranks = communicator.rank, communicator.world_size
        if ranks == 1:
            return
        try:
            token = communicator.broadcast_bytes(secrets.token_bytes(TOKEN_BYTES) if rank == 0 else b"", 0)
            server = self._server = _Published(communicator.host, token, ranks - 1)
            pulls = self._pulls = _Pulls(communicator, token, called_off)
            mine = json.dumps([communicator.host, server.port]).encode()
            texts = [communicator.broadcast_bytes(mine if rank == each else b"", each) for each in range(ranks)]
            pulls.peers = {each: tuple(json.loads(text)) for each, text in enumerate(texts) if each != rank}
        except OSError as error:
            self.close()
            communicator.mark_broken()
            raise CommunicationFailedError(f"rank {rank} cannot publish its model: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group, and close all connections to other ranks."""
        server, pulls = self._server, self._pulls
        self._server, self._pulls, self._pulled = None, None, None
        if server is not None:
            server.end()
        if pulls is not None:
            pulls.close()

    @property
    def stands(self) -> bool:
        """True if the ranks of the current group exchange models."""
        return self._server is not None

    def publish(self, layout: int, parts: Sequence[torch.Tensor], now_s: float = 0.0) -> None:
        """Make a copy of this model available to other ranks.

        Args:
            layout: Digest of the shapes of its ``parts``.
            now_s: Time of its publication [s, monotonic].
        """
        if self._server is not None:
            self._server.publish(layout, parts, now_s)

    def held(self, layout: int) -> list[tuple[float, list[torch.Tensor]]]:
        """Return this rank's last two published models, each with the time of its publication."""
        return self._server.held(layout) if self._server is not None else []

    def arrived(self, into: Sequence[torch.Tensor]) -> float | None:
        """Return when the model that was pulled into ``into`` since the last call was published; None for no model."""
        pulled = self._pulled
        if pulled is None or not pulled.done():
            return None
        self._pulled = None
        return pulled.result() if self._into is into else None

    def ask(self, layout: int, into: Sequence[torch.Tensor]) -> bool:
        """Start pulling a random other rank's model into ``into``; False if a pull is running or no rank is left."""
        if self._pulled is not None or self._pulls is None:
            return False
        self._into, self._pulled = into, self._pulls.start(layout, into)
        return self._pulled is not None
