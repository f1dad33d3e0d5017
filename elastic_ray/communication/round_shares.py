"""SHELL over TCP: decides which rank makes which steps of a round, so that fast ranks make steps of late ones.

A server on rank 0 counts the steps that have begun for each rank. A rank counts a step before it makes the
step, so each step is made once.
"""

from __future__ import annotations

import json
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator

_Answer = TypeVar("_Answer")

_TOKEN_BYTES = 16
_TOKEN_S = 10.0  # in which a rank shows that it is one
# round, first rank, ranks, and whether the first one's step is to be counted; as many counts come back
_QUESTION = struct.Struct("!QHHB")
_LOOK_S = 1.0  # between two looks whether the group is still wanted
_CHEAP = 0.01  # part of a step that an answer may take, to be asked for when it is needed and not before
_EARLY = 1.5  # answers' times before a step's end at which the next one is counted otherwise


class _Counts(socketserver.ThreadingTCPServer):
    """Server with the number of steps that have begun for each rank in the current round."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, token: bytes, ranks: int) -> None:
        self.token, self._ranks = token, ranks
        self._lock = threading.Lock()
        self._round, self._counts = -1, list[int]()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Caller)

    def end(self) -> None:
        """Stop answering, and release the port."""
        self.shutdown()
        self.server_close()

    def count(self, number: int, first: int, ranks: int, *, adds: bool) -> Sequence[int]:
        """Return the steps begun for each of these ranks; with ``adds``, then count one more for the first of them."""
        with self._lock:
            if number > self._round:
                self._round, self._counts = number, [1] * self._ranks  # each has begun its first
            found = self._counts[first : first + ranks]
            if adds:
                self._counts[first] += 1
            return found


class _Caller(socketserver.BaseRequestHandler):
    """Handler of one rank's connection."""

    server: _Counts

    def handle(self) -> None:
        """Answer requests until the rank disconnects."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request.settimeout(_TOKEN_S)
        try:
            token = self.request.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
        except OSError:
            return
        if not secrets.compare_digest(token, self.server.token):
            return
        self.request.settimeout(None)
        stream = self.request.makefile("rb")
        while len(question := stream.read(_QUESTION.size)) == _QUESTION.size:
            number, first, ranks, adds = _QUESTION.unpack(question)
            counts = self.server.count(number, first, ranks, adds=bool(adds))
            self.request.sendall(struct.pack(f"!{len(counts)}I", *counts))


class RoundShares:
    """Steps of a round that this rank makes: its own steps, and steps of ranks that are late."""

    def __init__(self) -> None:
        self._server: _Counts | None = None
        self._socket: socket.socket | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._called_off: Callable[[], bool] = lambda: False
        self._rank, self._ranks = 0, 1
        self.active = False  # in the present round
        self._number = self._steps = 0
        self._own = 0  # the own step that this rank makes, or was the last to make; as many as there are for no more
        self._counted: Future[int] | None = None  # the next one, which is being counted
        self._looked: Future[bool] | None = None  # whether all steps have been begun
        self._leaves = False  # what is left of the round to ranks that have it done sooner
        self._due, self._lock = threading.Event(), threading.Lock()
        self._since_s = self._answer_s = self._step_s = 0.0

    def enter(self, communicator: Communicator, *, wanted: bool, called_off: Callable[[], bool]) -> None:
        """Enter a group; all ranks call this with the same ``wanted``, and False shares no steps.

        Raises CommunicationFailedError: the group broke, or rank 0 cannot be reached.
        """
        self.close()
        if not wanted:
            return
        self._rank, self._ranks, self._called_off = communicator.rank, communicator.world_size, called_off
        told, token = b"", secrets.token_bytes(_TOKEN_BYTES)
        try:
            if self._rank == 0:
                self._server = _Counts(communicator.host, token, self._ranks)
                threading.Thread(target=self._server.serve_forever, daemon=True, name="round-shares").start()
                told = json.dumps([communicator.host, self._server.server_address[1], token.hex()]).encode()
            host, port, token_text = json.loads(communicator.broadcast_bytes(told, 0))
            self._socket = socket.create_connection((host, port), timeout=communicator.timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(_LOOK_S)
            self._socket.sendall(bytes.fromhex(token_text))
        except OSError as error:
            communicator.mark_broken()
            raise CommunicationFailedError(f"rank {self._rank} does not reach rank 0's counts: {error}") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="round-shares")

    def close(self) -> None:
        """Leave the group."""
        self._due.set()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:  # whose end takes up to half a second
            threading.Thread(target=self._server.end, daemon=True).start()
        self._server = self._socket = self._thread = self._counted = self._looked = None
        self.active = False

    @property
    def stands(self) -> bool:
        """True if the ranks of the current group can share their steps."""
        return self._thread is not None

    def begin_round(self, number: int, steps: int) -> None:
        """Start a round of ``steps`` steps per rank; ``number`` must exceed that of the group's earlier rounds."""
        self.active, self._number, self._steps = True, number, steps
        self._counted = self._looked = None
        self._own, self._leaves, self._since_s = 0, False, time.monotonic()
        self._count_ahead()

    def end_round(self) -> None:
        """End the round on this rank."""
        self.active = False

    def is_own(self, step: int) -> bool:
        """True if this rank makes its own step of this number; False if another rank has begun it, or will.

        Raises CommunicationFailedError: rank 0 is gone.
        """
        if step > self._own:
            self._step_s = time.monotonic() - self._since_s
            self._due.set()
            counted, self._counted = self._counted or self._submit(0.0), None
            self._own, self._since_s = self._answered(counted), time.monotonic()
            self._count_ahead()
        return step == self._own

    def of_another(self) -> tuple[int, int] | None:
        """Return (rank, step number) of a late rank's step that this rank now begins; None if none is left for it.

        Raises CommunicationFailedError: rank 0 is gone.
        """
        looked, self._looked = self._looked, None
        if looked is not None:
            self._due.set()
            if self._answered(looked):
                return None
        while not self._leaves:
            begun = self._ask(0, self._ranks, adds=False)
            rank = min(range(self._ranks), key=lambda each: begun[each])
            if begun[rank] >= self._steps:
                return None
            (step,) = self._ask(rank, 1, adds=True)
            if step < self._steps:
                return rank, step
        return None

    def _count_ahead(self) -> None:
        """Count the next own step in the background, shortly before it is due, unless answers are fast enough.

        After its last own step, this checks whether all steps have begun, as they have if no rank is late.
        """
        if self._own < self._steps and self._answer_s > _CHEAP * self._step_s:
            wait_s = max(0.0, self._step_s - _EARLY * self._answer_s)
            if self._own + 1 < self._steps:
                self._counted = self._submit(wait_s)
            elif self._thread is not None:
                self._due.clear()
                self._looked = self._thread.submit(self._all_begun, wait_s)

    def _submit(self, wait_s: float) -> Future[int]:
        """Count this rank's next step after ``wait_s`` seconds, unless faster ranks will make it."""
        assert self._thread is not None, "a round is in progress"
        self._due.clear()
        return self._thread.submit(self._count, self._own + 1, wait_s)

    def _count(self, before: int, wait_s: float) -> int:
        """Return the number of the own step that begins now, or the number of steps of a round if there is none."""
        self._due.wait(wait_s)
        asked_s = time.monotonic()
        (begun,) = self._ask(self._rank, 1, adds=False)
        taken = begun - before
        if taken and self._steps - begun <= taken:  # while this rank has made one step they have begun so many
            self._leaves = True
            return self._steps
        (step,) = self._ask(self._rank, 1, adds=True)
        self._answer_s = 0.5 * (self._answer_s + time.monotonic() - asked_s)
        return min(step, self._steps)

    def _all_begun(self, wait_s: float) -> bool:
        self._due.wait(wait_s)
        return min(self._ask(0, self._ranks, adds=False)) >= self._steps

    def _answered(self, counted: Future[_Answer]) -> _Answer:
        try:
            return counted.result()
        except CancelledError as error:
            raise CommunicationFailedError("the group was left") from error

    def _ask(self, first: int, ranks: int, *, adds: bool) -> tuple[int, ...]:
        """Send a request to rank 0 and return the answer; stop waiting once the group is called off."""
        answer, wanted = bytearray(), 4 * ranks
        try:
            with self._lock:
                assert self._socket is not None, "the group stands"
                self._socket.sendall(_QUESTION.pack(self._number, first, ranks, adds))
                while len(answer) < wanted:
                    try:
                        piece = self._socket.recv(wanted - len(answer))
                    except TimeoutError:
                        if self._called_off():
                            raise CommunicationFailedError("the group was called off") from None
                        continue
                    if not piece:
                        raise CommunicationFailedError("rank 0, which counts the steps of a round, is gone")
                    answer += piece
        except OSError as error:
            raise CommunicationFailedError(f"rank 0, which counts the steps of a round, is gone: {error}") from error
        return struct.unpack(f"!{ranks}I", answer)
