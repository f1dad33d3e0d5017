"""Work objects for gloo's sends and receives, with a thread that waits for them (no torch)."""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class BackgroundWork(concurrent.futures.Future[None]):
    """Work object for transfers in a separate thread, because gloo can neither poll nor cancel sends and receives.

    The thread ends at the group's timeout at the latest, as gloo's own threads do.

    Args:
        transfer: Makes the transfers and waits for them; raises RuntimeError if a peer is gone.
    """

    def __init__(self, transfer: Callable[[], None]) -> None:
        super().__init__()

        def run() -> None:
            try:
                transfer()
            except RuntimeError as error:
                self.set_exception(error.with_traceback(None))  # its frames would keep the group alive
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(None)

        thread = threading.Thread(target=run, name="transfer", daemon=True)
        _THREADS.add(thread)
        thread.start()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until all transfers have ended.

        Raises RuntimeError if a transfer has failed, or ``timeout`` has passed.
        """
        try:
            failure = self.exception(None if timeout is None else timeout.total_seconds())
        except concurrent.futures.TimeoutError as error:
            raise RuntimeError("transfers have not ended yet") from error
        if failure is not None:
            raise RuntimeError(str(failure)) from failure

    def is_completed(self) -> bool:
        """True once all transfers have ended."""
        return self.done()

    def get_future(self) -> BackgroundWork:
        """Return the work object itself, which accepts callbacks."""
        return self


def join_transfers(timeout_s: float) -> None:
    """Wait up to ``timeout_s`` [s] for each thread whose transfers have ended and which is returning from gloo."""
    for each in list(_THREADS):
        each.join(timeout_s)
