"""SHELL: disposal of communicators that a worker no longer uses, in a separate thread."""

from __future__ import annotations

import threading
import time

from elastic_ray.communication.background_work import exiting, start_thread
from elastic_ray.communication.communicator import Communicator
from elastic_ray.communication.connections import drop_ended_groups, leave_at_exit

# ProcessGroupGloo cannot cancel an operation, and dropping the group joins its threads: a broken group is parked
# for this long after its last possible operation.
_RETIRED_GRACE_S = 5.0


class RetiredCommunicators:
    """Disposal of unused groups: healthy ones are dropped at once, broken ones when their last operation times out.

    Dropping a gloo group joins its threads, which takes tens of milliseconds. A separate thread does this, so that no
    training step waits. The thread runs until no group is left to drop.
    """

    def __init__(self) -> None:
        self._retired: list[tuple[float, Communicator]] = []
        self._news = threading.Condition()
        self._dropping: threading.Thread | None = None
        leave_at_exit(self)

    def retire(self, communicator: Communicator) -> None:
        """Schedule an unused communicator to be dropped in the background."""
        grace_s = communicator.timeout_s + _RETIRED_GRACE_S if communicator.broken or communicator.voided else 0.0
        with self._news:
            self._retired.append((time.monotonic() + grace_s, communicator))
            self._news.notify_all()
            if self._dropping is None:
                self._dropping = start_thread(self._drop, "retired-groups")

    def drop_healthy(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` [s] until every healthy group has been dropped."""
        with self._news:
            self._news.wait_for(lambda: all(each.broken or each.voided for _, each in self._retired), timeout_s)

    def leave(self, timeout_s: float) -> None:
        """End the thread before the interpreter exits; each group then leaves by itself."""
        with self._news:
            self._news.notify_all()

    def _drop(self) -> None:
        """Drop groups as they become due, until none are left or the interpreter exits."""
        while True:
            with self._news:
                if not self._retired or exiting.is_set():
                    self._dropping = None
                    return
                until_s, communicator = min(self._retired, key=lambda each: each[0])
                if until_s > time.monotonic():
                    self._news.wait(until_s - time.monotonic())
                    continue
            communicator.close()
            drop_ended_groups()
            with self._news:
                self._retired = [each for each in self._retired if each[1] is not communicator]
                self._news.notify_all()
