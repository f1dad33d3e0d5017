"""SHELL over TCP: assignment of a round's steps to ranks, so that fast ranks make steps for slow ones.

A server on rank 0 counts the steps that have been started for each rank. A rank increments the count before it
makes a step, so that each step is made only once.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.communication.rank_server import TOKEN_BYTES, RankServer, shut

_Answer = TypeVar("_Answer")

# round, first rank, ranks, and whether the first one's step is to be counted; as many counts come back
_QUESTION = struct.Struct("!QHHB")
_ALL = (1 << 32) - 1  # steps that have begun in a round that is over
_LOOK_S = 1.0  # between two looks whether the group is still wanted
_CHEAP = 0.01  # part of a step that an answer may take, to be asked for when it is needed and not before
_EARLY = 1.5  # answers' times before a step's end at which the next one is counted otherwise


class _Counts(RankServer):
    """Server that counts the steps started for each rank in the current round."""

    def __init__(self, host: str, token: bytes, ranks: int) -> None:
        self._ranks, self._round, self._counts = ranks, -1, list[int]()
        super().__init__(host, token, ranks, "round-shares")

    def answer(self, caller: socket.socket) -> None:
        """Answer the requests of one connection until it ends."""
        with caller.makefile("rb") as stream:
            while len(question := stream.read(_QUESTION.size)) == _QUESTION.size:
                number, first, ranks, adds = _QUESTION.unpack(question)
                counts = self._count(number, first, ranks, adds=bool(adds))
                caller.sendall(struct.pack(f"!{len(counts)}I", *counts))

    def _count(self, number: int, first: int, ranks: int, *, adds: bool) -> Sequence[int]:
        """Return the steps started for each rank from ``first`` on; with ``adds``, then add one for ``first``.

        A round that has ended has no steps left.
        """
        with self._lock:
            if number < self._round:
                return [_ALL] * ranks
            if number > self._round:
                self._round, self._counts = number, [1] * self._ranks  # each has begun its first
            found = self._counts[first : first + ranks]
            if adds:
                self._counts[first] += 1
            return found


class _Member:
    """A rank's connection to one group's counts, and the thread that requests counts ahead of time."""

    def __init__(self, communicator: Communicator, address: tuple[str, int], called_off: Callable[[], bool]) -> None:
        self.rank, self.ranks, self.timeout_s = communicator.rank, communicator.world_size, communicator.timeout_s
        self._called_off, self._lock, self._ended = called_off, threading.Lock(), False
        self._socket = socket.create_connection(address, timeout=communicator.timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(_LOOK_S)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="round-shares")

    def introduce(self, token: bytes) -> None:
        """Show the server that this is a rank."""
        self._socket.sendall(token)

    def close(self) -> None:
        """Leave the group; requests in progress fail at once."""
        self._ended = True
        self.thread.shutdown(wait=False, cancel_futures=True)
        shut(self._socket)

    def ask(self, number: int, first: int, ranks: int, *, adds: bool) -> tuple[int, ...]:
        """Send a request to rank 0 and return the answer.

        Raises CommunicationFailedError if rank 0 is gone or does not answer in time, or the group was left or called
        off. A late answer is never mistaken for the answer to a later request.
        """
        with self._lock:
            if self._ended:
                raise CommunicationFailedError("the group was left")
            try:
                return self._ask(_QUESTION.pack(number, first, ranks, adds), ranks)
            except OSError as error:
                self._ended = True
                raise CommunicationFailedError(
                    f"rank 0, which counts the steps of a round, was lost: {error}"
                ) from error
            except CommunicationFailedError:
                self._ended = True
                raise

    def _ask(self, question: bytes, ranks: int) -> tuple[int, ...]:
        """Return the counts of ``ranks`` ranks. Raises OSError, or CommunicationFailedError like :meth:`ask`."""
        answer, wanted, until_s = bytearray(), 4 * ranks, time.monotonic() + self.timeout_s
        self._socket.sendall(question)
        while len(answer) < wanted:
            try:
                piece = self._socket.recv(wanted - len(answer))
            except TimeoutError:
                if self._ended or self._called_off():
                    raise CommunicationFailedError("the group was called off") from None
                if time.monotonic() > until_s:
                    raise CommunicationFailedError(
                        f"rank 0, which counts the steps of a round, has not answered for {self.timeout_s:.0f} s"
                    ) from None
                continue
            if not piece:
                raise CommunicationFailedError("rank 0, which counts the steps of a round, is gone")
            answer += piece
        return struct.unpack(f"!{ranks}I", answer)


class _SharedRound:
    """Round in progress, with the tasks that request its counts ahead of time."""

    def __init__(self, member: _Member, number: int, steps: int) -> None:
        self._member, self._number, self.steps = member, number, steps
        self.due = threading.Event()  # ends the pause of the task
        self.over = False
        self.leaves = False  # what is left of the round to ranks that have it done sooner

    def ask(self, first: int, ranks: int, *, adds: bool) -> tuple[int, ...]:
        """Request the round's counts from rank 0; CommunicationFailedError if rank 0 is gone or the round has ended."""
        if self.over:
            raise CommunicationFailedError("the round is over")
        return self._member.ask(self._number, first, ranks, adds=adds)

    def end(self) -> None:
        """Refuse further requests, and end the pause of a task."""
        self.over = True
        self.due.set()

    def leave_rest(self) -> None:
        """Leave the remaining steps to ranks that finish them sooner."""
        self.leaves = True


class RoundShares:
    """Assignment of a round's steps to this rank: its own steps, and steps of late ranks.

    A round is the local steps that all ranks make between two averages of their models.
    """

    def __init__(self) -> None:
        self._server: _Counts | None = None
        self._member: _Member | None = None
        self._round: _SharedRound | None = None
        self._own = 0  # the own step that this rank makes, or was the last to make; as many as there are for no more
        self._counted: Future[int] | None = None  # the next one, which is being counted
        self._looked: Future[bool] | None = None  # whether all steps have been begun
        self._since_s = self._answer_s = self._step_s = 0.0

    def enter(self, communicator: Communicator, *, wanted: bool, called_off: Callable[[], bool]) -> None:
        """Enter a group whose ranks share their steps if ``wanted``; all ranks call this with the same ``wanted``.

        ``called_off`` returns True once the group is no longer wanted, which ends all waits.

        Raises CommunicationFailedError if the group broke, or rank 0 cannot be reached.
        """
        self.close()
        if not wanted:
            return
        told, token = b"", secrets.token_bytes(TOKEN_BYTES)
        try:
            if communicator.rank == 0:
                self._server = _Counts(communicator.host, token, communicator.world_size)
                told = json.dumps([communicator.host, self._server.port, token.hex()]).encode()
            host, port, token_text = json.loads(communicator.broadcast_bytes(told, 0))
            self._member = _Member(communicator, (host, port), called_off)
            self._member.introduce(bytes.fromhex(token_text))
        except OSError as error:
            self.close()
            communicator.mark_broken()
            cause = f"rank {communicator.rank} does not reach rank 0's counts: {error}"
            raise CommunicationFailedError(cause) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group, and close all connections to other ranks."""
        self.end_round(lost=True)
        if self._member is not None:
            self._member.close()
        if self._server is not None:
            self._server.end()
        self._server = self._member = None

    @property
    def stands(self) -> bool:
        """True if the ranks of the current group can share their steps."""
        return self._member is not None

    @property
    def active(self) -> bool:
        """True in a round (local steps between two averages of models) whose steps are shared between ranks."""
        return self._round is not None

    def start_round(self, number: int, steps: int) -> None:
        """Start a round of ``steps`` steps per rank; round numbers must increase within a group."""
        assert self._member is not None, "the group stands"
        self._round = _SharedRound(self._member, number, steps)
        self._own, self._since_s = 0, time.monotonic()
        self._count_ahead()

    def end_round(self, *, lost: bool = False) -> None:
        """End the round on this rank. Unless the round is ``lost``, wait for a request that is in progress."""
        ended, self._round = self._round, None
        asking: list[Future[Any]] = [each for each in (self._counted, self._looked) if each is not None]
        self._counted = self._looked = None
        if ended is not None:
            ended.end()
            if not lost and asking and self._member is not None:
                wait(asking, self._member.timeout_s)

    def is_own(self, step: int) -> bool:
        """True if this rank should make its own step number ``step``; False if another rank makes it instead.

        Raises CommunicationFailedError if rank 0 is gone.
        """
        if step > self._own:
            self._step_s = time.monotonic() - self._since_s
            self._present.due.set()
            counted, self._counted = self._counted or self._submit(0.0), None
            self._own, self._since_s = self._answered(counted), time.monotonic()
            self._count_ahead()
        return step == self._own

    def of_another(self) -> tuple[int, int] | None:
        """Return a late rank's step for this rank to make next, as (late rank, step number); None if none remains.

        Raises CommunicationFailedError if rank 0 is gone.
        """
        present, ranks = self._present, self._known.ranks
        looked, self._looked = self._looked, None
        if looked is not None:
            present.due.set()
            if self._answered(looked):
                return None
        while not present.leaves:
            begun = present.ask(0, ranks, adds=False)
            rank = min(range(ranks), key=lambda each: begun[each])
            if begun[rank] >= present.steps:
                return None
            (step,) = present.ask(rank, 1, adds=True)
            if step < present.steps:
                return rank, step
        return None

    @property
    def _present(self) -> _SharedRound:
        assert self._round is not None, "a round is in progress"
        return self._round

    @property
    def _known(self) -> _Member:
        assert self._member is not None, "the group stands"
        return self._member

    def _count_ahead(self) -> None:
        """Count the next own step in the background, shortly before it is due, unless answers are fast enough.

        After its last own step, this checks whether all steps have been started, as is the case if no rank is late.
        """
        present = self._present
        if self._own < present.steps and self._answer_s > _CHEAP * self._step_s:
            wait_s = max(0.0, self._step_s - _EARLY * self._answer_s)
            if self._own + 1 < present.steps:
                self._counted = self._submit(wait_s)
            else:
                present.due.clear()
                self._looked = self._known.thread.submit(self._all_begun, present, self._known.ranks, wait_s)

    def _submit(self, wait_s: float) -> Future[int]:
        """Count this rank's next step after ``wait_s`` seconds, unless faster ranks will make it."""
        self._present.due.clear()
        return self._known.thread.submit(self._count, self._present, self._known.rank, self._own + 1, wait_s)

    def _count(self, present: _SharedRound, rank: int, before: int, wait_s: float) -> int:
        """Return the number of this rank's next own step; the round's number of steps if none is left."""
        present.due.wait(wait_s)
        asked_s = time.monotonic()
        (begun,) = present.ask(rank, 1, adds=False)
        taken = begun - before
        if taken and present.steps - begun <= taken:  # while this rank has made one step they have begun so many
            present.leave_rest()
            return present.steps
        (step,) = present.ask(rank, 1, adds=True)
        self._answer_s = 0.5 * (self._answer_s + time.monotonic() - asked_s)
        return min(step, present.steps)

    def _all_begun(self, present: _SharedRound, ranks: int, wait_s: float) -> bool:
        present.due.wait(wait_s)
        return min(present.ask(0, ranks, adds=False)) >= present.steps

    def _answered(self, counted: Future[_Answer]) -> _Answer:
        try:
            return counted.result()
        except CancelledError as error:
            raise CommunicationFailedError("the group was left") from error
