"""One wait for a collective that fails on one worker, although the others have its result."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.run.current import session_of_thread
from tests.loop.changing import Change, Kill, Killed, Outcome, run_job

_WAIT_S = 2.0  # for the others to have the result as well


@dataclasses.dataclass(slots=True)
class Tear:
    """Worker ``behind``'s wait number ``wait`` since it joined a group fails; ``dies`` starts nothing after its own.

    Attributes:
        joins: workers that enter with the next group.
        waits: how many each worker has ended in the group.
    """

    wait: int
    behind: int = 2
    dies: int = 1
    joins: tuple[int, ...] = ()
    generation: int = 1
    waits: dict[int, int] = dataclasses.field(default_factory=dict)


class TornCommunicator(Communicator):
    """Counts the waits of a worker's own thread."""

    def __init__(self, *arguments: Any, tear: Tear, generation: int, **options: Any) -> None:
        self._tear, self._present, self._within = tear, generation == tear.generation, threading.local()
        super().__init__(*arguments, **options)

    def waited_briefly(self, work: Any) -> bool:
        ended = super().waited_briefly(work)
        if ended and not getattr(self._within, "wait", False):
            self._count()
        return ended

    def wait(self, work: Any, *, patience_s: float = math.inf, since_s: float | None = None) -> bool:
        self._within.wait = True
        try:
            ended = super().wait(work, patience_s=patience_s, since_s=since_s)
        finally:
            self._within.wait = False
        if ended:
            self._count()
        return ended

    def wait_all(self, *arguments: Any, **options: Any) -> None:
        super().wait_all(*arguments, **options)
        self._count()

    def _guard(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        tear, worker = self._tear, _worker()
        if self._present and worker == tear.dies and tear.waits.get(worker, 0) > tear.wait:
            raise Killed(tear.joins)
        return super()._guard(operation, *arguments)

    def _count(self) -> None:
        tear, worker = self._tear, _worker()
        if not worker or not self._present:
            return
        tear.waits[worker] = tear.waits.get(worker, 0) + 1
        if (worker, tear.waits[worker]) == (tear.behind, tear.wait + 1):
            until_s = time.monotonic() + _WAIT_S
            while min(tear.waits.values()) <= tear.wait and time.monotonic() < until_s:
                time.sleep(0.001)
            self.mark_broken()
            raise CommunicationFailedError("the group broke")


def _worker() -> int:
    """The worker whose thread this is; 0 for none, and for one that has not joined yet."""
    session = session_of_thread()
    return int(session.worker[1:]) if session is not None and session.synced else 0


def run_torn(
    train: Callable[[], Any], tear: Tear, script: Sequence[Change | Kill] = (), first: Sequence[int] = (1, 2, 3)
) -> Outcome:
    """Run a train function in a job with that wait."""
    return run_job(train, script, first=first, make=functools.partial(TornCommunicator, tear=tear))
