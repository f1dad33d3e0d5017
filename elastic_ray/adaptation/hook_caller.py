"""SHELL: calls hooks of policies in a thread, so that one that blocks does not hold the training up for good."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class HookTimeoutError(TimeoutError):
    """A hook has not returned within its deadline."""


class HookCaller:
    """See the module's text. One call at a time; the thread is a daemon and ends with :meth:`close`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def call(self, hook: Callable[[], Any], timeout_s: float) -> Any:
        """What ``hook`` returns or raises.

        A hook that does not return in time keeps its thread; the next call gets another one.

        Raises:
            HookTimeoutError: it has not returned after ``timeout_s`` [s].
        """
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="policies", daemon=True).start()
        answer: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((hook(), None))
            except Exception as error:
                answer.put((None, error))
            except BaseException as error:  # such as SystemExit: the hook's, not this process's
                answer.put((None, RuntimeError(f"it raised {type(error).__name__}: {error}")))

        self._calls.put(run)
        try:
            value, error = answer.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise HookTimeoutError(f"it has not returned within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Let the thread end once it is free."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None


def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
