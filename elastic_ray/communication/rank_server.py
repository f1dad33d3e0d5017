"""SHELL over TCP: server on one rank that only answers the other ranks of its group."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod

TOKEN_BYTES = 16
_TOKEN_S = 5.0  # in which a rank shows that it is one
_PAUSE_S = 0.05  # after a connection that could not be accepted
_BACKLOG = 16  # connections that may wait to be accepted, at least


class RankServer(ABC):
    """Server for ``callers`` ranks, which must present ``token``; it stops listening once all are connected."""

    def __init__(self, host: str, token: bytes, callers: int, name: str) -> None:
        self._token, self._expected, self._name = token, callers, name
        self._lock, self._closed = threading.Lock(), False
        self._known, self._callers = 0, set[socket.socket]()
        self._strangers = threading.BoundedSemaphore(2 * callers)  # callers that have not shown the token yet
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=max(_BACKLOG, callers))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name=name).start()

    @abstractmethod
    def answer(self, caller: socket.socket) -> None:
        """Answer a connected rank's requests until its connection ends. Raises OSError if the connection ends."""

    def end(self) -> None:
        """Disconnect all ranks, and release the port."""
        with self._lock:
            self._closed = True
            callers = list(self._callers)
        for each in (self._listener, *callers):
            shut(each)

    def _accept(self) -> None:
        """Accept connections until all ranks are connected."""
        while True:
            self._strangers.acquire()
            try:
                caller, _ = self._listener.accept()
            except OSError:
                self._strangers.release()
                if self._listener.fileno() < 0:  # all ranks are known, or the group is left
                    return
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                self._callers.add(caller)
                if self._closed:
                    shut(caller)
            threading.Thread(target=self._serve, args=(caller,), daemon=True, name=self._name).start()

    def _serve(self, caller: socket.socket) -> None:
        """Answer the requests of one connection until it ends."""
        try:
            with contextlib.suppress(OSError):
                if self._is_rank(caller):
                    self.answer(caller)
        finally:
            with self._lock:
                self._callers.discard(caller)
            caller.close()

    def _is_rank(self, caller: socket.socket) -> bool:
        """True if the caller shows the token in time."""
        try:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            token, until_s = b"", time.monotonic() + _TOKEN_S
            while len(token) < TOKEN_BYTES:
                caller.settimeout(max(0.001, until_s - time.monotonic()))
                if not (piece := caller.recv(TOKEN_BYTES - len(token))) or time.monotonic() > until_s:
                    return False
                token += piece
            if not secrets.compare_digest(token, self._token):
                return False
            caller.settimeout(None)
        finally:
            self._strangers.release()
        with self._lock:
            self._known += 1
            if self._known == self._expected:
                shut(self._listener)
        return True


def shut(one: socket.socket) -> None:
    """Close a socket, and wake any thread that is waiting on it."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
