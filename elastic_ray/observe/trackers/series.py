"""Data series of a run for trackers, as numbers keyed by name (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from elastic_ray.batch.reports import StepReport
from elastic_ray.events import EventKind, JobEvent, flattened
from placement.text import count

PREFIX = "elastic/"
"""What begins the names of the job's own numbers, beside those that the user reports."""
REPORT = f"{PREFIX}report"
"""Number of a report: by it a tracker that begins again knows what it has."""

_MARKS = frozenset(
    {
        *(EventKind.STARTED, EventKind.RESIZE, EventKind.FAILURE, EventKind.RESTART, EventKind.PREEMPTED),
        *(EventKind.PAUSED, EventKind.RESUMED, EventKind.BATCH, EventKind.BATCH_KEPT, EventKind.STRATEGY),
        *(EventKind.STRAGGLER, EventKind.OUT_OF_MEMORY, EventKind.RECOVERED, EventKind.NOT_FINITE, EventKind.FINISHED),
    }
)
_STARTS = frozenset({EventKind.STARTED, EventKind.RECOVERED})
_SIZES = frozenset({EventKind.RESIZE, EventKind.FAILURE, EventKind.PREEMPTED, EventKind.PAUSED})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobNumbers:
    """Numbers that describe a job's training at one moment, as passed to trackers."""

    time_s: float  # when [s since the epoch]
    step: int  # optimizer steps committed then
    values: Mapping[str, float]  # workers, batch [samples], learning-rate factor..., by name without :data:`PREFIX`


def job_numbers(
    report: StepReport,
    *,
    throughput: float,
    goodput: float | None,
    noise_scale: float | None,
    resizes: int,
    failures: int,
    time_s: float,
) -> JobNumbers:
    """Return the numbers to track after a step report from rank 0.

    Args:
        goodput: Modelled goodput [samples/s]; None before a model has been fitted.
    """
    values = {
        "workers": report.replicas,
        "nodes": report.nodes,
        "batch_size": report.batch_size,
        "epoch": report.epoch,
        "step_time_s": report.step_time or None,
        "throughput": throughput or None,
        "tokens_per_s": throughput * report.tokens_per_sample if throughput and report.tokens_per_sample else None,
        "goodput": goodput,
        "noise_scale": noise_scale,
        "learning_rate_factor": report.learning_rate_factor,
        "resizes": resizes,
        "failures": failures,
    }
    known = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
    return JobNumbers(time_s=time_s, step=report.total_steps, values=known)


def flat_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return reported metrics that are numbers, keyed by name, with nested names as ``outer/inner``."""
    found: dict[str, float] = {}
    for name, value in flattened(values):
        if isinstance(value, int | float):
            try:
                found[name] = float(value)
            except OverflowError:  # a whole number beyond all floats
                found[name] = math.inf if value > 0 else -math.inf
    return found


def is_mark(event: JobEvent) -> bool:
    """True if the event should be shown as a mark on a run's curves."""
    return event.kind in _MARKS


def is_change_of_size(event: JobEvent) -> bool:
    """True if the event changes the number of workers of a job that is training, including to zero."""
    return event.kind in _SIZES


def changes_workers(event: JobEvent) -> bool:
    """True if, after the event, a job trains with a different number of workers than before; also at its start."""
    return event.kind in _STARTS or is_change_of_size(event)


def mark_text(event: JobEvent) -> str:
    """Return a line of text that describes an event marked on a run's curves."""
    pause = f", pause {event.pause_s:.2f} s" if event.pause_s else ""
    return f"{event.from_workers} -> {count(event.to_workers)}{pause}: {event.reason}"


class SeenReports:
    """Set of report numbers that a tracker has received; all numbers up to a rising limit count as received."""

    _MOST = 1000

    def __init__(self, all_up_to: int = 0, besides: frozenset[int] = frozenset()) -> None:
        self._floor = all_up_to
        self._above = {number for number in besides if number > all_up_to}
        self._shrink()

    @property
    def last(self) -> int:
        """Largest report number received; 0 if no report was received."""
        return max(self._above, default=self._floor)

    def add(self, number: int) -> bool:
        """Add a report's number; return True if the tracker had not received the report before."""
        if number <= self._floor or number in self._above:
            return False
        self._above.add(number)
        self._shrink()
        return True

    def go_back(self, last: int) -> None:
        """Remove report numbers above ``last``, because the run repeats these reports."""
        self._floor = min(self._floor, last)
        self._above = {number for number in self._above if number <= last}

    def _shrink(self) -> None:
        while self._floor + 1 in self._above:
            self._floor += 1
            self._above.remove(self._floor)
        if len(self._above) > self._MOST:
            self._floor = min(self._above)
            self._above.remove(self._floor)
