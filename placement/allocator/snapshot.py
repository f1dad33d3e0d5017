"""Snapshot of the allocator: its jobs, its decision log, and predicted start times for waiting jobs.

All are plain values. Start times are predicted from the times when running jobs end and release their slots.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence

from placement.autoscaling.autoscaler import ScalingDecision
from placement.cluster.cluster import Cluster, by_node
from placement.cluster.jobs import JobView, WorkerKind, goodputs, worker_kind
from placement.cluster.node_record import NodeHistory
from placement.cluster.packing import FreeResources
from placement.goodput.remaining import remaining
from placement.planning.constraints import Constraints
from placement.planning.tenants import Tenant
from placement.reasons import Reason
from placement.text import count, printable


class Trigger(str, enum.Enum):
    """Trigger of a decision; if there were several, only the first is recorded."""

    ARRIVAL = "arrival"
    """A job has come."""
    END = "end"
    """A job is over."""
    NODES = "nodes"
    """The nodes have changed."""
    LIMITS = "limits"
    """What a job may have has changed."""
    WEIGHT = "weight"
    """What a job's speed counts has changed."""
    MODEL = "model"
    """What is known of a job's speed has changed."""
    REFRESH = "refresh"
    """Nothing has happened for long."""
    SILENCE = "silence"
    """A job sends no heartbeats any more, and was dropped."""
    REFUSED = "refused"
    """The policy's answer was invalid, and nothing changed."""

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """Record of one decision: the change for one job, and its reason."""

    time_s: float  # the ``now_s`` of the event
    trigger: Trigger  # what led to the decision
    job: str  # the job; of a refusal, empty
    from_workers: int  # planned workers before
    to_workers: int  # planned workers after
    nodes: Mapping[str, int]  # planned workers per node id after
    reason: Reason  # why

    def __str__(self) -> str:
        if not self.job:
            return printable(f"decision {self.trigger}: {self.reason.explained}")
        change = f"{self.from_workers}->{count(self.to_workers)}"
        return printable(f"job {self.job}: {change} ({self.trigger}; {self.reason})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of one job in the allocator: its last view, planned workers and reason."""

    view: JobView
    target: Mapping[str, int]
    reason: Reason
    heard_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CoreSnapshot:
    """State of the allocator at one moment, for the CLI, dashboards and tests."""

    policy: str
    settled: bool
    cluster: Cluster
    jobs: Mapping[str, JobState]
    log: tuple[DecisionRecord, ...]
    node_failures: tuple[NodeHistory, ...] = ()  # living nodes on which workers have failed
    constraints: Constraints = Constraints()  # noqa: RUF009  # it is frozen


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorLook:
    """State of the allocator as polled by the web page, with only the new records from the decision log."""

    core: CoreSnapshot  # its ``log`` holds the records that are new, oldest first
    recorded: int  # decision records so far, those that are kept no more included: the number of the last one
    life: str  # differs from one allocator to the one after it, whose numbers start anew
    tenants: tuple[Tenant, ...] = ()
    scaling: ScalingDecision | None = None  # the last decision about the cluster's size; None where it decides none
    spot_types: frozenset[str] = frozenset()  # node types whose nodes may be taken away
    decision_cpu_s: float | None = None  # CPU time of the last decision [s]; None before the first
    decided_s: float | None = None  # when that was [s since the epoch]; None before the first


EVERY_S = 5.0


class StartTimes:
    """Cache of estimated start times for waiting jobs."""

    def __init__(self, look: Callable[[], CoreSnapshot]) -> None:
        self._poll = look
        self._starts: dict[str, float] = {}
        self._looked_s: float | None = None

    def of(self, job: str, now_s: float) -> float | None:
        """Return the estimated time until a waiting job gets its smallest size [s]; None if it cannot be estimated."""
        if self._looked_s is None or not 0.0 <= now_s - self._looked_s < EVERY_S:
            self._starts, self._looked_s = self._estimate(), now_s
        start_s = self._starts.get(job)
        return None if start_s is None else max(0.0, start_s - (now_s - self._looked_s))

    def _estimate(self) -> dict[str, float]:
        seen = self._poll()
        waiting = [state.view for state in seen.jobs.values() if not state.target and not state.view.paused]
        running = [(state.view, state.target) for state in seen.jobs.values() if state.target]
        return start_times(waiting, running, seen.cluster) if waiting else {}


def start_times(
    waiting: Sequence[JobView], running: Sequence[tuple[JobView, Mapping[str, int]]], cluster: Cluster
) -> dict[str, float]:
    """Return the time until each waiting job's smallest size fits [s], keyed by job, omitting unpredictable jobs.

    The estimate is rough. It assumes that every running job keeps its current size and goodput until it ends, that a
    job without a declared length or a fitted model never ends, that nodes and the set of jobs do not change, and that
    jobs started in the meantime do not end. Waiting jobs are served by priority, then by arrival; among jobs with the
    same kind of worker, each waits for the jobs before it.
    """
    room = FreeResources(cluster)
    for view, target in running:
        _give(room, view, target, 1)
    queues: dict[WorkerKind, collections.deque[JobView]] = {}
    for view in sorted(waiting, key=lambda view: (-view.priority, view.arrival)):
        queues.setdefault(worker_kind(view), collections.deque()).append(view)
    ends = sorted((_seconds_left(view, target), number) for number, (view, target) in enumerate(running))
    starts = dict.fromkeys(_start(room, queues), 0.0)
    for end_s, number in ends:
        if end_s == math.inf or not any(queues.values()):
            break
        view, target = running[number]
        _give(room, view, target, -1)
        starts |= dict.fromkeys(_start(room, queues), end_s)
    return starts


def _start(room: FreeResources, queues: Mapping[WorkerKind, collections.deque[JobView]]) -> list[str]:
    """Start waiting jobs that fit, in order within each kind up to the first that does not; return their names."""
    started = []
    for queue in queues.values():
        while queue and room.add(queue[0], queue[0].held_at or queue[0].min_workers):
            started.append(queue.popleft().job)
    return started


def _give(room: FreeResources, view: JobView, target: Mapping[str, int], sign: int) -> None:
    """Reserve a job's workers in the room, or release them if ``sign`` is -1. Nodes that are gone do not count."""
    for node, workers in by_node(target).items():
        index = room.index(node)
        if index is not None:
            room.take(view, index, sign * workers)


def _seconds_left(view: JobView, target: Mapping[str, int]) -> float:
    """Return the time until a running job ends at its current size [s]; infinite if unknown."""
    left = remaining(view.progress)
    values = goodputs(view, list(target.values()))
    if left is None or not view.init_batch_size or not values.size or not values[-1] > 0:
        return math.inf
    return float(left * view.init_batch_size / values[-1])
