"""Where a job's time went, and how far it is: what a status tells of past and future (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from elastic_ray.events import EventKind, JobEvent
from placement.cluster.progress import Progress
from placement.goodput.remaining import remaining

_WITHOUT_WORKERS = (EventKind.RESTART, EventKind.PREEMPTED, EventKind.FINISHED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Where the time since a job's submission went; the parts sum to the whole.

    Attributes:
        waiting_s: without a group that trains: waiting for resources, and workers that start [s, >= 0].
        pausing_s: of groups that trained, the pauses of their changes of size [s, >= 0].
        training_s: the rest [s, >= 0].
    """

    waiting_s: float
    pausing_s: float
    training_s: float

    @property
    def total_s(self) -> float:
        """Time since submission, for an ended job until its end [s]."""
        return self.waiting_s + self.pausing_s + self.training_s

    @property
    def productive_share(self) -> float | None:
        """Training time / time since submission (ETTR), 0 to 1; None before any time has passed."""
        # A ratio of floats that sum to the whole may exceed 1 by a rounding.
        return min(1.0, self.training_s / self.total_s) if self.total_s > 0 else None


def time_spent(events: Iterable[JobEvent], submitted_s: float, now_s: float) -> TimeSpent:
    """Divide the time since submission by what a job's events tell.

    Args:
        events: of the job, in their order; one whose clock went back counts as of the same time as the one before.
        submitted_s: when it was submitted [s since the epoch].
        now_s: the present [s since the epoch]; without meaning after the event of the job's end.
    """
    waiting = pausing = training = 0.0
    since, trains, paused, ended = submitted_s, False, 0.0, False
    for event in events:
        if trains and event.kind is not EventKind.STARTED:
            paused += max(0.0, event.pause_s)
        begins = event.kind is EventKind.STARTED and not trains
        stops = event.kind in _WITHOUT_WORKERS
        if not (begins or stops):
            continue
        until = max(since, event.time_s)
        if trains:
            pause = min(paused, until - since)
            pausing, training = pausing + pause, training + (until - since - pause)
        else:
            waiting += until - since
        since, trains, paused = until, begins, 0.0
        ended = event.kind is EventKind.FINISHED
    lasting = 0.0 if ended else max(0.0, now_s - since)
    pause = min(paused, lasting) if trains else 0.0
    if trains:
        return TimeSpent(waiting_s=waiting, pausing_s=pausing + pause, training_s=training + (lasting - pause))
    return TimeSpent(waiting_s=waiting + lasting, pausing_s=pausing, training_s=training)


def progress_ratio(progress: Progress | None) -> float | None:
    """Iterations done / (done + left), 0 to 1; None without a declared length."""
    left = remaining(progress)
    if progress is None or left is None:
        return None
    whole = progress.done + left
    return progress.done / whole if whole > 0 else 0.0


def seconds_to_end(progress: Progress | None, init_batch_size: int | None, goodput: float | None) -> float | None:
    """Iterations left x M0 / goodput [s, >= 0]; None where one of them is unknown.

    Args:
        progress: of the job, in iterations at M0.
        init_batch_size: M0 [samples].
        goodput: of the present configuration [samples/s].
    """
    left = remaining(progress)
    if left is None or not init_batch_size or not goodput or not math.isfinite(goodput):
        return None
    return left * init_batch_size / goodput
