"""Outlook of a job: how its time was spent so far, and how much work is left (pure)."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from elastic_ray.events import EventKind, JobEvent, JobPhase, Pause, named_parts
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.roster import WorkerPhase
from placement.cluster.cluster import GPU_TYPE_LABEL
from placement.cluster.jobs import Progress
from placement.goodput.remaining import remaining
from placement.text import count

_WITHOUT_WORKERS = (EventKind.RESTART, EventKind.PREEMPTED, EventKind.PAUSED, EventKind.FINISHED)
_FEW_RATES = 3
_SPREAD_OF_FEW = 0.5
_MOST_SPREAD = 0.75
_LEAST_EFFICIENCY = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Time since a job's submission, divided by activity; the parts sum to the total [s, each >= 0]."""

    waiting_s: float = 0.0  # for resources, without processes
    starting_s: float = 0.0  # from the start of its processes until a group trained
    pausing_s: float = 0.0  # of groups that trained, the pauses of their changes
    catching_up_s: float = 0.0  # training after a restart, until the job was as far as before it
    training_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Time from submission until now, or until the job ended [s]."""
        return sum(named_parts(self).values())

    @property
    def productive_share(self) -> float | None:
        """Training time divided by time since submission (ETTR), 0 to 1; None before any time has passed."""
        # A ratio of floats that sum to the whole may exceed 1 by a rounding.
        return min(1.0, self.training_s / self.total_s) if self.total_s > 0 else None

    def without_group(self, lasted_s: float, started_for_s: float) -> TimeSpent:
        """Return a copy with ``lasted_s`` added: ``started_for_s`` to starting processes, the rest to waiting [s]."""
        starting_s = min(max(0.0, started_for_s), lasted_s)
        waiting_s = self.waiting_s + (lasted_s - starting_s)
        return dataclasses.replace(self, waiting_s=waiting_s, starting_s=self.starting_s + starting_s)

    def with_group(self, lasted_s: float, paused_s: float, *, catching_up: bool) -> TimeSpent:
        """Return a copy with ``lasted_s`` added: ``paused_s`` to pauses, the rest to training or catching up [s]."""
        pause_s = min(max(0.0, paused_s), lasted_s)
        name = "catching_up_s" if catching_up else "training_s"
        trained_s = getattr(self, name) + (lasted_s - pause_s)
        return dataclasses.replace(self, pausing_s=self.pausing_s + pause_s, **{name: trained_s})


def time_spent(events: Iterable[JobEvent], submitted_s: float, now_s: float, started_for_s: float = 0.0) -> TimeSpent:
    """Return how the time since a job's submission was spent, according to the job's events.

    Args:
        events: The job's events, in order; an event with an earlier time than its predecessor counts as simultaneous.
        now_s: Current time [s since the epoch]; ignored if the job has ended.
        started_for_s: How long processes have been starting, if no group is training [s].
    """
    spent, since, paused, goal = TimeSpent(), submitted_s, 0.0, 0
    trains = ended = False
    for event in events:
        if trains and event.kind is not EventKind.STARTED:
            paused += max(0.0, event.pause_s)
        begins, stops = event.kind is EventKind.STARTED and not trains, event.kind in _WITHOUT_WORKERS
        if begins or stops or (event.kind is EventKind.CAUGHT_UP and trains):
            until = max(since, event.time_s)
            if trains:
                spent = spent.with_group(until - since, paused, catching_up=goal > 0)
            else:
                spent = spent.without_group(until - since, number_of(event.detail, "start_s"))
            since, paused = until, 0.0
            trains = begins or (trains and not stops)
            ended = event.kind is EventKind.FINISHED
        goal = _goal(goal, event)
    lasting = 0.0 if ended else max(0.0, now_s - since)
    if trains:
        return spent.with_group(lasting, paused, catching_up=goal > 0)
    return spent.without_group(lasting, started_for_s)


def steps_to_reach(events: Iterable[JobEvent]) -> int:
    """Return the step that a job had reached before losing steps, while it is repeating them; 0 if it is not."""
    goal = 0
    for event in events:
        goal = _goal(goal, event)
    return goal


def _goal(before: int, event: JobEvent) -> int:
    """Return the value of ``steps_to_reach`` after one more event."""
    if event.kind is EventKind.CAUGHT_UP:
        return 0
    reached = int(number_of(event.detail, "reached_steps"))
    if event.kind is EventKind.RESTART and reached > number_of(event.detail, "steps"):
        return max(before, reached)
    return before


def last_pause(events: Sequence[JobEvent], generation: int, first_step_s: float | None) -> Pause | None:
    """Return the latest pause in training from a job's events; None if training never paused.

    Args:
        first_step_s: Duration of this group's first step [s], used if the pause led to this group; None if unknown.
    """
    for event in reversed(events):
        if event.kind in (EventKind.RESIZE, EventKind.FAILURE) and event.pause_s > 0:
            vote_s, group_s, state_s = (number_of(event.detail, name) for name in ("vote_s", "group_s", "state_s"))
            first_s = first_step_s if generation == event.generation else None
            return Pause(vote_s=vote_s, group_s=group_s, state_s=state_s, first_step_s=first_s)
    return None


def number_of(detail: Mapping[str, Any], name: str) -> float:
    """Return the number called ``name`` in an event's detail; 0 if it is missing or not finite."""
    value = detail.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return 0.0


def with_length(progress: Progress | None, dataset_size: int | None, init_batch_size: int | None) -> Progress | None:
    """Return ``progress``; until an epoch has ended, its iterations per epoch are set to dataset size / M0."""
    if progress is None or progress.epoch_ends or progress.usual_epoch is not None:
        return progress
    if not dataset_size or not init_batch_size:
        return progress
    return dataclasses.replace(progress, usual_epoch=dataset_size / init_batch_size)


def progress_ratio(progress: Progress | None) -> float | None:
    """Return iterations done / (done + left), 0 to 1; None if the job has not declared its length."""
    left = remaining(progress)
    if progress is None or left is None:
        return None
    whole = progress.done + left
    return progress.done / whole if whole > 0 else 0.0


def samples_to_end(
    progress: Progress | None, dataset_size: int | None, init_batch_size: int | None, efficiency: float | None
) -> int | None:
    """Return the number of samples until the job's end; None if its length or samples per iteration are unknown."""
    left = remaining(progress)
    if progress is None or left is None:
        return None
    per_epoch = progress.epoch_ends[-1] / len(progress.epoch_ends) if progress.epoch_ends else progress.usual_epoch
    if dataset_size and per_epoch:
        return round(left / per_epoch * dataset_size * progress.stride)
    if init_batch_size and efficiency is not None and math.isfinite(efficiency) and efficiency > 0:
        return round(left * init_batch_size / efficiency)
    return None


def seconds_to_end(progress: Progress | None, init_batch_size: int | None, goodput: float | None) -> float | None:
    """Return the time until the job ends, iterations left x M0 / goodput [s]; None if any of these is unknown."""
    left = remaining(progress)
    if left is None or not init_batch_size or not goodput or not math.isfinite(goodput) or goodput < 0:
        return None
    return left * init_batch_size / goodput


def eta_range(
    eta_s: float | None, rates: Iterable[float], efficiency: float | None
) -> tuple[float, float] | tuple[None, None]:
    """Return likely bounds on the time until the job ends, low <= eta <= high [s]; (None, None) if unknown.

    Let v be the coefficient of variation of recent speeds (standard deviation / mean), and c = min(2 v, 0.75), or c =
    0.5 with fewer than three speeds. Then::

        low  = E eta / (1 + c)
        high = eta / (1 - c)

    E is the statistical efficiency of the current batch, at least 0.1: the noise scale tends to grow during training,
    and at best every sample will count fully (McCandlish et al. 2018). The bounds ignore size changes by the allocator.
    """
    if eta_s is None or not math.isfinite(eta_s) or eta_s < 0:
        return None, None
    seen = [rate for rate in rates if math.isfinite(rate) and rate > 0]
    spread = _SPREAD_OF_FEW
    if len(seen) >= _FEW_RATES:
        largest = max(seen)  # their squares could overflow
        scaled = [rate / largest for rate in seen]
        spread = min(2.0 * statistics.pstdev(scaled) / statistics.fmean(scaled), _MOST_SPREAD)
    known = efficiency is not None and math.isfinite(efficiency)
    gain = min(max(efficiency, _LEAST_EFFICIENCY), 1.0) if known and efficiency is not None else 1.0
    return gain * eta_s / (1.0 + spread), eta_s / (1.0 - spread)


def reports_to_end(reports: int, most: int | None) -> float | None:
    """Return ``reports / most`` (0 to 1), the progress of a run that ends after ``most`` reports; None if unlimited."""
    return min(1.0, max(0, reports) / most) if most else None


def seconds_of_reports(trained_s: float, made: int, left: int) -> float | None:
    """Return the time for ``left`` more reports at the pace of the ``made`` reports [s]; None before the first."""
    return trained_s / made * max(0, left) if made > 0 else None


def waits_for(
    spec: JobSpec,
    phase: JobPhase,
    *,
    workers: Collection[WorkerPhase],
    target_workers: int,
    storage: str,
    needs_node: bool,
) -> str:
    """Return what a job is waiting for: storage, slots, a node, a placement group, or processes; empty if nothing."""
    if phase.ended:
        return ""
    if storage:
        return "storage"
    if phase in (JobPhase.RUNNING, JobPhase.PAUSED):
        return ""
    if not target_workers:
        return ("a node of the autoscaler with " if needs_node else "") + _slots(spec)
    reserving = sum(each is WorkerPhase.RESERVING for each in workers)
    if reserving:
        return f"placement group of {reserving} of {count(max(len(workers), target_workers))}"
    return "start of processes"


def _slots(spec: JobSpec) -> str:
    """Return a description of the slots needed, such as ``2 slots (CPU 1, GPU 1) on T4``."""
    needs = ", ".join(f"{name} {amount:g}" for name, amount in sorted(spec.bundle.items()))
    kind = spec.label_selector.get(GPU_TYPE_LABEL, "")
    return f"{count(spec.min_workers, 'slot')} ({needs})" + (f" on {kind}" if kind else "")
