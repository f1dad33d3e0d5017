"""Base for allocation policies, with shared rules for admitting jobs and growing them to the highest score."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from placement.cluster.cluster import AllocationError, Cluster
from placement.cluster.jobs import JobView, speeds
from placement.cluster.packing import FreeResources, pack
from placement.goodput.step_time import Floats
from placement.reasons import Cause, Reason
from placement.text import count, describe


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Target size of a job: its number of workers, with the reason; a job with 0 workers waits.

    Attributes:
        workers: Number of workers.
        reason: Reason for the number: a sentence (from a custom policy) or a ``Reason``.
        nodes: Number of workers keyed by node id, from a policy that chooses the nodes itself; the numbers must add up
            to ``workers``. If None, ``placement.cluster.packing`` chooses the nodes.

    Examples:
        >>> from placement import Target
        >>> Target(workers=2, reason="half of the cluster").workers
        2
    """

    workers: int
    reason: Reason | str
    nodes: Mapping[str, int] | None = None


def as_targets(policy: str, answer: object) -> Mapping[str, Target]:
    """Convert a policy's answer to a ``Target`` for each job: plain numbers to targets, plain text to reasons.

    ``policy`` is its name, for reasons. The numbers are not checked here; the core rejects invalid ones later.
    """
    if not isinstance(answer, Mapping):
        raise AllocationError("mapping", f"a policy answers with {{job: workers or Target}}, but got {answer!r}")
    targets = {}
    for job, told in answer.items():
        target = told if isinstance(told, Target) else Target(workers=told, reason=Reason(Cause.DECIDED, (policy,)))
        if not isinstance(target.reason, Reason):
            target = dataclasses.replace(target, reason=Reason(Cause.POLICY, (policy, str(target.reason))))
        targets[job] = target
    return targets


@runtime_checkable
class Policy(Protocol):
    """Policy that decides how many workers each job gets; ``placement.cluster.packing`` chooses their nodes.

    The contract tests check that every registered policy returns a target for every job; never exceeds the cluster;
    gives a job ``min_workers`` or nothing, and never more than ``max_workers``; gives ``held_at`` if it fits; does
    not depend on the order of the jobs; repeats its decision if called again with the same input once that decision
    is in effect; and leaves nothing idle that a job could use. A policy reads no clock and uses no randomness.

    A policy need not handle priorities, tenants or deadlines. If any of these matter,
    ``placement.planning.constraints`` calls the policy several times per decision, each time with some of the jobs
    and part of the cluster.

    A class may set ``rigid = True`` if it was published for jobs that run at exactly the batch size and worker count
    that their user requested; a simulation then runs jobs that way. A class with slow imports may define a method
    ``load_solver()`` that performs them. The allocator calls it in a thread at startup, so that its event loop does not
    block.

    Examples:
        >>> from placement import Cluster, JobView, Target
        >>> class One:
        ...     name = "one"
        ...     def decide(self, jobs, cluster, now_s):
        ...         return {job.job: Target(workers=1, reason="one each") for job in jobs}
        ...
        >>> One().decide([JobView(job="a", bundle={"GPU": 1.0})], Cluster(), 0.0)["a"].workers
        1
    """

    @property
    def name(self) -> str:
        """Name of the policy, as shown in reasons and errors."""
        ...

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size for every job, keyed by job name.

        ``JobView.allocation`` holds the workers that a job has or is planned to have. ``now_s`` is the wall-clock time
        [s since the epoch], the only clock that a policy may use.
        """
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Admission:
    """Jobs admitted to run, each with its floor (the fewest workers it gets), and the room left for growth."""

    empty: FreeResources  # the cluster's room without any of the jobs
    room: FreeResources  # what is left after every admitted job has its floor
    # workers of each admitted job: its minimum, or for held jobs what they are held at, if it fits
    floors: dict[str, int]
    waiting: dict[str, Reason]  # reason per job that does not run


def admit(jobs: Sequence[JobView], cluster: Cluster) -> Admission:
    """Decide which jobs run: each job gets its minimum number of workers or nothing.

    Running jobs come first, then waiting jobs, each in order of arrival. Jobs grow only afterwards, into the room that
    is left. Other jobs are therefore shrunk to admit a waiting job, though never below their own minimum. A smaller job
    may overtake a larger one that does not fit. Finally, jobs with a size fixed by their user are raised to it in order
    of arrival, or as close to it as room allows.
    """
    room = FreeResources(cluster)
    floors: dict[str, int] = {}
    waiting: dict[str, Reason] = {}
    for view in sorted(jobs, key=lambda view: (view.workers == 0, view.arrival)):
        if room.add(view, view.min_workers):
            floors[view.job] = view.min_workers
            continue
        waiting[view.job] = no_room(view, int(room.slots(view).sum()), len(floors))
    for view in sorted(jobs, key=lambda view: view.arrival):
        if view.job in floors and view.held_at is not None:
            more = min(view.held_at - floors[view.job], int(room.slots(view).sum()))
            if more > 0 and room.add(view, more):
                floors[view.job] += more
    return Admission(empty=FreeResources(cluster), room=room, floors=floors, waiting=waiting)


def grow(order: Sequence[JobView], admission: Admission) -> dict[str, int]:
    """Return each admitted job's number of workers after the jobs in ``order`` have grown one by one.

    Each job gets the number of workers with the highest speed that fits into the room left by earlier jobs. Jobs with a
    fixed size stay at their floor. The workers are deducted from ``admission.room``.
    """
    counts = dict(admission.floors)
    for view in order:
        if view.job not in counts or view.held_at is not None:
            continue
        floor, slots = counts[view.job], admission.room.slots(view)
        most = min(view.useful_workers, floor + int(slots.sum()))
        if most <= floor:
            continue
        # Nodes are counted as on an empty cluster: only an estimate of how many it will span.
        speed = speeds(view, admission.empty.slots(view).tolist(), most)
        more = int(np.argmax(speed[floor:]))
        if more and admission.room.add(view, more):
            counts[view.job] += more
    return counts


def no_room(view: JobView, fits: int, others: int) -> Reason:
    """Return why a job is waiting: only ``fits`` workers fit beside the minimums of ``others`` other jobs."""
    wanted = f"{view.min_workers} x {describe(view.bundle)}"
    cause = Cause.MEMORY if 1 < view.sizes.fitting == view.min_workers else Cause.NO_ROOM
    return Reason(cause, (wanted, fits), f"the minimum of {count(others, 'other job')} comes first")


def held(view: JobView, workers: int) -> Reason | None:
    """Return the reason for a job's size if its user has fixed it; None otherwise."""
    if view.held_at is None:
        return None
    whole = workers == view.held_at
    return Reason(Cause.HELD, (workers,)) if whole else Reason(Cause.HELD_IN_PART, (view.held_at, workers))


Score = Callable[[JobView, int], "float | None"]
"""(job, its workers) -> what one more is worth; None if it wants no more."""

Worth = Callable[[JobView, Floats, int], "float | None"]
"""(job, its speed on 0..n workers, its workers) -> what one more is worth; None if it wants no more."""


def climb(jobs: Sequence[JobView], admission: Admission, score: Score) -> dict[str, int]:
    """Return each admitted job's number of workers after workers are added one by one where the score is highest.

    ``score`` rates one more worker, given a job and its number of workers; it returns None if the job wants no more.
    Ties go to the job that arrived first. Jobs with a fixed size stay at their floor. The workers are deducted from
    ``admission.room``.
    """
    counts = dict(admission.floors)
    views = {view.job: view for view in jobs}
    heap: list[tuple[float, tuple[float, str], str]] = []

    def offer(job: str) -> None:
        view = views[job]
        if view.held_at is None:
            worth = score(view, counts[job])
            if worth is not None:
                heapq.heappush(heap, (-worth, view.arrival, job))

    for job in counts:
        offer(job)
    while heap:
        _, _, job = heapq.heappop(heap)
        if admission.room.add(views[job], 1):
            counts[job] += 1
            offer(job)
    return counts


def decide_by_worth(
    jobs: Sequence[JobView],
    cluster: Cluster,
    worth: Worth,
    say: Callable[[int, float | None], str],
    *,
    slow_factor: float | None = None,
) -> dict[str, Target]:
    """Return each job's target: minimums first, then one worker at a time to the job that values it most.

    Each worth is multiplied by ``JobView.weight``; a negative worth, which is a cost, is divided by it.

    Args:
        slow_factor: Avoid nodes where steps take at least this many times longer; None uses all nodes.
    """
    healthy = cluster if slow_factor is None else without_slow(jobs, cluster, slow_factor)
    admission = admit(jobs, healthy)
    curves = {view.job: speeds(view, admission.empty.slots(view).tolist()) for view in jobs}

    def score(view: JobView, workers: int) -> float | None:
        curve = curves[view.job]
        return worth(view, curve, workers) if workers + 1 < len(curve) else None

    def weighed(view: JobView, workers: int) -> float | None:
        value = score(view, workers)
        return value if value is None else value * view.weight if value > 0 else value / view.weight

    counts = climb(jobs, admission, weighed)
    targets = {job: Target(workers=0, reason=why) for job, why in admission.waiting.items()}
    for view in jobs:
        if view.job in counts:
            workers = counts[view.job]
            why = held(view, workers) or say(workers, score(view, workers))
            targets[view.job] = Target(workers=workers, reason=why)
    return targets if healthy is cluster else _placed(targets, jobs, healthy)


def without_slow(jobs: Sequence[JobView], cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with slow nodes, where some job's steps take ``factor`` times longer, marked as draining.

    One slow worker holds up its whole group, so a job is usually faster without that worker. If avoiding the slow nodes
    would change which jobs are admitted or their floors, all nodes stay in use.
    """
    slow = {node for view in jobs for node, times in view.slow_nodes.items() if times >= factor}
    rest = cluster.draining(slow)
    if rest == cluster or admit(jobs, rest).floors != admit(jobs, cluster).floors:
        return cluster
    return rest


def _placed(targets: dict[str, Target], jobs: Sequence[JobView], cluster: Cluster) -> dict[str, Target]:
    """Return the targets with explicit nodes of this cluster, so that the core does not use the avoided nodes."""
    allocation = pack({job: target.workers for job, target in targets.items()}, jobs, cluster).allocation
    placed = {}
    for job, target in targets.items():
        nodes = allocation.get(job, {})
        reason = Reason(Cause.SLOW, figures=str(target.reason))
        placed[job] = dataclasses.replace(target, workers=sum(nodes.values()), nodes=nodes or None, reason=reason)
    return placed


def grow_in_turn(order: Sequence[JobView], admission: Admission) -> dict[str, Target]:
    """Return targets after growing jobs one by one, for slot-counting policies if the jobs' workers differ in kind."""
    counts = grow(order, admission)
    why = "workers; workers of several kinds, so jobs grow in turn"
    return {
        view.job: Target(workers=counts[view.job], reason=f"{counts[view.job]} {why}")
        for view in order
        if view.job in counts
    }
