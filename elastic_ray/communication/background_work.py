"""Threads that wait within gloo, and work objects for its sends and receives (no torch)."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
exiting = threading.Event()
"""Set when the interpreter is about to exit: a group that is forming is then called off."""


def start_thread(target: Callable[..., None], name: str, *args: object) -> threading.Thread:
    """Start and return a daemon thread that may wait within gloo; :func:`join_threads` joins it before the exit.

    Python ends a daemon thread that returns from C++ code after the interpreter has begun to exit. C++ code cannot be
    unwound that way, so that the process would abort ("terminate called").
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _THREADS.add(thread)
    thread.start()
    return thread


def join_threads(timeout_s: float) -> None:
    """Wait up to ``timeout_s`` [s] until all threads from :func:`start_thread` have ended."""
    until_s = time.monotonic() + timeout_s
    for each in list(_THREADS):
        each.join(max(0.0, until_s - time.monotonic()))


class BackgroundWork(concurrent.futures.Future[None]):
    """Work object for transfers in a separate thread, because gloo can neither poll nor cancel sends and receives."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until all transfers have ended.

        Raises RuntimeError: a transfer has failed, or ``timeout`` has passed.
        """
        try:
            failure = self.exception(None if timeout is None else timeout.total_seconds())
        except concurrent.futures.TimeoutError as error:
            raise RuntimeError("transfers have not ended yet") from error
        if failure is not None and not isinstance(failure, RuntimeError):
            raise failure  # a fault of the code, which no new group mends
        if failure is not None:
            raise RuntimeError(str(failure)) from failure

    def is_completed(self) -> bool:
        """True once all transfers have ended."""
        return self.done()

    def get_future(self) -> BackgroundWork:
        """Return the work itself, to which callbacks can be added."""
        return self


class TransferThreads:
    """Threads that make transfers in the order of their start, and end when none are left.

    All ranks start them in one order, so that the first of those under way is under way on each rank, and can end.
    Each of their waits ends at the group's timeout at the latest, as those of gloo's own threads do. After one has
    failed, all that have not started fail too, because the group is broken.

    Args:
        most: Number of transfers at once.
    """

    def __init__(self, most: int = 1) -> None:
        self._most, self._running, self._lock = most, 0, threading.Lock()
        self._waiting = collections.deque[tuple[BackgroundWork, Callable[[], None]]]()
        self._failure: BaseException | None = None

    def start(self, transfer: Callable[[], None]) -> BackgroundWork:
        """Start ``transfer``, which raises RuntimeError if a peer is gone; return its work object."""
        work = BackgroundWork()
        with self._lock:
            self._waiting.append((work, transfer))
            if self._running == self._most:
                return work
            self._running += 1
        start_thread(self._run, "transfer")
        return work

    def _run(self) -> None:
        """Make transfers until none are left."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                work, transfer = self._waiting.popleft()
            try:
                if self._failure is None:
                    transfer()
            except RuntimeError as error:
                self._failure = error.with_traceback(None)  # its frames would keep the group alive
            except BaseException as error:
                self._failure = error
            if self._failure is None:
                work.set_result(None)
            else:
                work.set_exception(self._failure)
