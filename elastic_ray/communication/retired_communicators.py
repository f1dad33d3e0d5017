"""SHELL: releases groups that are out of use, when that is safe and where nobody waits for it."""

from __future__ import annotations

import threading
import time

from elastic_ray.communication.communicator import Communicator
from elastic_ray.communication.kept_groups import drop_ended_groups

# ProcessGroupGloo cannot cancel an operation, and dropping the group joins its threads: a broken group is parked
# for this long after its last possible operation.
_RETIRED_GRACE_S = 5.0


class RetiredCommunicators:
    """Drops groups that are out of use: a healthy one at once, a broken one when its last operation has timed out.

    Dropping a gloo group joins its threads, which takes tens of milliseconds: a thread of its own does it, so that no
    step waits. It lives as long as there is something to drop.
    """

    def __init__(self) -> None:
        self._retired: list[tuple[float, Communicator]] = []
        self._news = threading.Condition()
        self._dropping: threading.Thread | None = None

    def retire(self, communicator: Communicator) -> None:
        """Retire a communicator; returns at once."""
        grace_s = communicator.timeout_s + _RETIRED_GRACE_S if communicator.broken or communicator.voided else 0.0
        with self._news:
            self._retired.append((time.monotonic() + grace_s, communicator))
            self._news.notify_all()
            if self._dropping is None:
                self._dropping = threading.Thread(target=self._drop, name="retired-groups", daemon=True)
                self._dropping.start()

    def drop_healthy(self, timeout_s: float) -> None:
        """Wait until every healthy group has been dropped."""
        with self._news:
            self._news.wait_for(lambda: all(each.broken or each.voided for _, each in self._retired), timeout_s)

    def _drop(self) -> None:
        """Drop one after the other when its time has come, until there is none left."""
        while True:
            with self._news:
                if not self._retired:
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
