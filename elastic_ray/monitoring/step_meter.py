"""Times of the step in progress on one rank, and those of all ranks, which ride on the step's reduction.

No clock but the monotonic one is read here. It measures nothing, and nothing rides, until someone asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from elastic_ray.monitoring.measures import FIELDS, WorkerMeasures, packed, unpacked


class StepMeter:
    """See the module's text. A part of the control sums.

    Args:
        clock: the time [s]; only differences of it count.

    Attributes:
        workers: of all ranks, as of the latest step that was reduced; the same on every rank. Empty before the first.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._asked = False
        self.workers: tuple[WorkerMeasures, ...] = ()
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._data_s = self._sync_s = self._step_s = 0.0
        self._ready_s: float | None = None
        self._committed_s: float | None = None
        self._own = WorkerMeasures()

    @property
    def on(self) -> bool:
        """Whether it measures."""
        return self._asked

    def ask(self) -> None:
        """Measure from now on. Before the first epoch, on all ranks alike."""
        self._asked = True

    def begin_step(self) -> None:
        """The loader is about to fetch the first micro-batch of a step of training."""
        if self._asked:
            self._began_s, self._ready_s, self._data_s = self._clock(), None, 0.0

    def waited_for_data(self, seconds: float) -> None:
        """The loader has fetched a micro-batch of the step [s]."""
        self._data_s += seconds

    def end_step(self) -> None:
        """The step was committed."""
        if not self._asked:
            return
        now_s = self._clock()
        self._step_s = now_s - self._ended_s if self._ended_s is not None else 0.0
        self._ended_s, self._began_s = now_s, None
        self._committed_s = self._ready_s if self._ready_s is not None else self._committed_s

    def begin(self) -> None:
        """A group was entered: what lies between two groups is no step."""
        self.workers = ()
        self._began_s = self._ended_s = self._ready_s = None
        self._sync_s = self._step_s = 0.0

    def size(self, world_size: int) -> int:
        """Values that ride along."""
        return len(FIELDS) * world_size if self._asked else 0

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """This rank's gradients are complete, for the first time in the step."""
        if not self._asked:
            return ()
        if self._ready_s is None and self._began_s is not None:
            self._ready_s = self._clock()
            self._own = WorkerMeasures(
                compute_s=max(0.0, self._ready_s - self._began_s - self._data_s),
                data_s=self._data_s,
                sync_s=self._sync_s,
                step_s=self._step_s,
                passed_s=self._ready_s - self._committed_s if self._committed_s is not None else 0.0,
            )
        return packed(self._own, rank, world_size)

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """All ranks' rows."""
        if not self._asked:
            return
        if self._ready_s is not None and self._began_s is not None:
            self._sync_s = self._clock() - self._ready_s
        self.workers = unpacked(sums, world_size)
