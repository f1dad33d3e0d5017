"""Ctrl-C in a driver that waits for its job."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType


class Interrupts:
    """Notices Ctrl-C within its block, also where other code swallows the KeyboardInterrupt: a callback, a destructor.

    A context manager. Where the program handles SIGINT by itself, or in another thread than the main one, it does
    nothing.
    """

    def __init__(self) -> None:
        self._seen = self._handles = False

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._handles = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
        signal.default_int_handler(number, frame)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a Ctrl-C."""
        if self._seen:
            raise KeyboardInterrupt


def without_traceback(error: BaseException) -> None:
    """Have Python end without a traceback if nobody catches this exception: what it means has been printed."""
    show = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            show(kind, raised, trace)

    sys.excepthook = hook
