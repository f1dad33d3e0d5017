"""Data that the page keeps about one job: its latest status, its events and its numbers over time (pure)."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from elastic_ray.events import EventKind, JobEvent, JobStatus, Pause, named_parts, numbers_in
from elastic_ray.observe.page.model import Point
from elastic_ray.observe.page.source import JobFacts, JobLook
from elastic_ray.record.outlook import number_of, time_spent
from placement.allocator.snapshot import JobState

MOST_EVENTS, MOST_POINTS = 300, 600

_ROUNDING_S = 1e-6
_LEAST_PART = 1e-9  # of the variance: a smaller gradient cannot be told from none
_PARTS = ("vote_s", "group_s", "state_s")


class JobMemory:
    """Data kept about one job, bounded in size: if its series gets too long, every other point is dropped."""

    def __init__(self, job: str, colour: str, first_s: float) -> None:
        self.job, self.colour, self.first_s = job, colour, first_s
        self.status: JobStatus | None = None
        self.facts: JobFacts | None = None
        self.state: JobState | None = None
        self.ended_s: float | None = None
        self.events: collections.deque[JobEvent] = collections.deque(maxlen=MOST_EVENTS)
        self._series: list[Point] = []
        self._checkpoints: list[tuple[float, str]] = []
        self._samples = 0.0
        self._every_s = 0.0

    @property
    def series(self) -> tuple[Point, ...]:
        """The job's numbers over time, oldest first."""
        return tuple(self._series)

    def decided(self, state: JobState) -> None:
        """Store the allocator's current state for the job, and clear the record that the job has ended."""
        self.state, self.ended_s = state, None

    def ended(self, now_s: float) -> None:
        """Record that the job had ended at ``now_s``, unless an earlier call has already recorded this."""
        self.ended_s = now_s if self.ended_s is None else self.ended_s

    def receive(self, look: JobLook, now_s: float) -> tuple[JobEvent, ...]:
        """Store ``look``, the controller's answer; return its new events that the timeline shows as marks."""
        self.events.extend(look.events)
        self.facts = look.facts or self.facts
        if look.status is not None:
            before, self.status = self.status, look.status
            steps = look.status.step - (before.step if before is not None else 0)
            self._samples += max(steps, 0) * look.status.batch_size
            if steps and (not self._series or now_s - (self._series[-1][0] or 0.0) >= self._every_s):
                self._add(look.status, now_s)
            if before is not None and self.status.checkpoint not in ("", before.checkpoint):
                self._checkpoints.append((now_s, self.status.checkpoint))
        return tuple(event for event in look.events if event.kind in MARKS)

    def new_checkpoints(self) -> list[tuple[float, str]]:
        """Return (time, path) for each checkpoint seen since the previous call of this method."""
        found, self._checkpoints = self._checkpoints, []
        return found

    def _add(self, status: JobStatus, now_s: float) -> None:
        """Add one point to the series."""
        values = (
            now_s,
            self._samples,
            status.batch_size or None,
            status.throughput or None,
            status.workers,
            noise_scale(self.state),
            status.learning_rate_factor,
            numbers_in(status.metrics),
        )
        self._series.append(values)
        if len(self._series) > MOST_POINTS:
            self._series = self._series[::2]
            spans = max(self._series[-1][0] or 0.0, 1.0) - (self._series[0][0] or 0.0)
            self._every_s = 2 * spans / MOST_POINTS


MARKS: Mapping[EventKind, str] = {
    EventKind.RESIZE: "resize",
    EventKind.FAILURE: "kill",
    EventKind.RESTART: "kill",
    EventKind.PREEMPTED: "preempted",
    EventKind.PAUSED: "paused",
    EventKind.OUT_OF_MEMORY: "out of memory",
    EventKind.STRAGGLER: "straggler",
    EventKind.NOT_FINITE: "not finite",
}
"""Events that the timeline marks, and as what."""


def noise_scale(state: JobState | None) -> float | None:
    """Return the gradient noise scale in a job's current goodput model [samples].

    None without a model, or if the gradient is too small. B = tr(Sigma) / |G|^2 with the variance of a batch of M0
    samples, so that B = M0 var / sqr (McCandlish et al. 2018).
    """
    model = state.view.goodput if state is not None else None
    if model is None or model.noise.sqr <= _LEAST_PART * model.noise.var:
        return None
    return model.init_batch_size * max(model.noise.var, 0.0) / model.noise.sqr


def pauses(
    events: Iterable[JobEvent], last: Pause | None = None
) -> tuple[tuple[float, str, float, dict[str, float]], ...]:
    """Return (time, kind, seconds, {part: seconds}) of each event that paused training; unknown time is ``other``."""
    found = []
    for event in events:
        if event.pause_s <= 0:
            continue
        parts = {name.removesuffix("_s").replace("_", " "): number_of(event.detail, name) for name in _PARTS}
        parts = {name: seconds for name, seconds in parts.items() if seconds > 0}
        rest = event.pause_s - sum(parts.values())
        if rest > _ROUNDING_S:
            parts["other"] = rest
        found.append((event.time_s, event.kind.value, event.pause_s, parts))
    if found and last is not None and last.first_step_s is not None:
        found[-1][3]["first step"] = last.first_step_s
    return tuple(found)


def shares_of_time(
    events: Iterable[JobEvent], status: JobStatus | None, submitted_s: float, until_s: float
) -> dict[str, float]:
    """Return the seconds spent on each activity since submission (training, pausing, waiting...), keyed by name."""
    return named_parts(time_spent(events, submitted_s, until_s) if status is None else status)
