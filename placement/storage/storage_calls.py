"""Calls to storage that may never return, each in a thread and with a deadline (pure).

File systems are accessed through blocking calls; NFS without its server and S3 behind a dead link block forever. Such a
call costs only one thread of this pool: threads are few, they are daemons (so none delays its process's exit), and the
caller continues at its deadline.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_TOLD_AFTER_S = 2.0
_IDLE_S = 5.0
_POLL_S = 0.05


class StorageTimeoutError(TimeoutError):
    """Error raised if storage has not answered in time."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """Call to storage that runs in a thread."""

    what: str  # what it does, for messages: "writing events"
    run: Callable[[], Any]
    heard_s: float  # when storage has last been heard of [s, monotonic]: each piece of a long copy counts
    answer: Future[Any] = dataclasses.field(default_factory=Future)
    given_up: bool = False  # its caller does not wait for it any more; a call that continues in pieces ends itself

    def heard(self) -> bool:
        """Record that a part of the call has finished; return False if the caller has given up on it."""
        self.heard_s = time.monotonic()
        return not self.given_up

    def give_up(self) -> None:
        """Abandon the call. If it has not started yet, it never will."""
        self.given_up = True
        self.answer.cancel()


class StorageCalls:
    """Pool of threads for one owner's calls to one storage."""

    def __init__(self, where: str, *, threads: int = 4) -> None:
        self.where = where
        self._most = threads
        self._news = threading.Condition()
        self._queue: collections.deque[Call] = collections.deque()
        self._running: set[Call] = set()
        self._threads = 0
        self._idle = 0

    def start(self, what: str, function: Callable[[], Any]) -> Call:
        """Start a call in a thread and return it at once; its ``answer`` is a future. Messages name it ``what``."""
        return self._add(Call(what=what, run=function, heard_s=time.monotonic()))

    def start_long(self, what: str, function: Callable[[Callable[[], bool]], Any]) -> Call:
        """Start a call in parts: after each part, ``function`` calls its argument, and ends if that returns False."""
        call = Call(what=what, run=lambda: function(call.heard), heard_s=time.monotonic())
        return self._add(call)

    async def run(self, what: str, function: Callable[[], T], *, timeout_s: float) -> T:
        """Run a call in a thread and await its result."""
        call = self.start(what, function)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call.answer), timeout_s)
        except asyncio.TimeoutError as error:
            if call.answer.done() and not call.answer.cancelled():
                raise  # the function's own
            call.give_up()
            raise StorageTimeoutError(self.silent_for(call)) from error

    async def run_long(self, what: str, function: Callable[[Callable[[], bool]], T], *, timeout_s: float) -> T:
        """Run a call in several parts (see ``start_long``) and await its result; each part may take ``timeout_s``."""
        call = self.start_long(what, function)
        answer = asyncio.wrap_future(call.answer)
        while not answer.done():
            silent_s = time.monotonic() - call.heard_s
            if silent_s >= timeout_s:
                call.give_up()
                raise StorageTimeoutError(self.silent_for(call))
            await asyncio.wait([answer], timeout=timeout_s - silent_s)
        return answer.result()  # type: ignore[no-any-return]

    def call(self, what: str, function: Callable[[], T], *, timeout_s: float) -> T:
        """Run a call and block until it returns its result; raise StorageTimeoutError if ``timeout_s`` passes."""
        call = self.start(what, function)
        self.wait(call, timeout_s=timeout_s)
        return call.answer.result()  # type: ignore[no-any-return]

    def wait(self, call: Call, *, timeout_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until a call has ended or ``until`` returns True; return True if the call has ended, else abandon it.

        Raises StorageTimeoutError if storage was silent for ``timeout_s``.
        """
        finished = threading.Event()
        call.answer.add_done_callback(lambda _: finished.set())
        while not finished.is_set():
            if until():
                call.give_up()
                return False
            silent_s = time.monotonic() - call.heard_s
            if silent_s >= timeout_s:
                call.give_up()
                raise StorageTimeoutError(self.silent_for(call))
            finished.wait(min(_POLL_S, timeout_s - silent_s))
        return True

    def silent_for(self, call: Call) -> str:
        """Return a sentence saying how long storage has left a call unanswered."""
        return f"storage {self.where} has not answered for {time.monotonic() - call.heard_s:.0f} s: {call.what}"

    @property
    def heard_s(self) -> float:
        """Time when a running call last made progress [s, monotonic]; 0 if no call is running."""
        with self._news:
            return max((call.heard_s for call in self._running), default=0.0)

    def waiting(self) -> str:
        """Return a sentence about the longest unanswered call; empty if storage is answering."""
        with self._news:
            calls = [*self._running, *(call for call in self._queue if not call.given_up)]
        if not calls:
            return ""
        oldest = min(calls, key=lambda call: call.heard_s)
        return self.silent_for(oldest) if time.monotonic() - oldest.heard_s >= _TOLD_AFTER_S else ""

    def _add(self, call: Call) -> Call:
        """Queue a call and return it, after waking an idle thread or, if allowed, starting another one."""
        with self._news:
            self._queue.append(call)
            if self._idle >= len(self._queue):
                self._news.notify()
            elif self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=f"storage {self.where}", daemon=True).start()
        return call

    def _work(self) -> None:
        """Run queued calls, storing each result or exception as its answer, until none arrives for ``_IDLE_S``."""
        while (call := self._next()) is not None:
            if call.answer.set_running_or_notify_cancel():
                call.heard()
                try:
                    answer = call.run()
                except BaseException as error:
                    call.answer.set_exception(error)
                else:
                    call.answer.set_result(answer)
            with self._news:
                self._running.discard(call)
            del call

    def _next(self) -> Call | None:
        """Return the next call; None if the thread should end."""
        with self._news:
            if not self._queue:
                self._idle += 1
                self._news.wait(_IDLE_S)
                self._idle -= 1
            if not self._queue:
                self._threads -= 1
                return None
            call = self._queue.popleft()
            self._running.add(call)
            return call


def call_storage(where: str, what: str, function: Callable[[], T], *, timeout_s: float) -> T:
    """Make one blocking call to storage, with a deadline; errors name the storage ``where`` and the call ``what``."""
    return StorageCalls(where, threads=1).call(what, function, timeout_s=timeout_s)
