"""Greedy growth: workers are added one at a time, each to the job with the highest score."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, speeds
from placement.cluster.packing import pack
from placement.goodput.step_time import Floats
from placement.policies.shared.base import Admission, Target, admit, grow, held
from placement.reasons import Cause, Reason

Score = Callable[[JobView, int], "float | None"]
"""(job, its workers) -> what one more is worth; None if it wants no more."""

Worth = Callable[[JobView, Floats, int], "float | None"]
"""(job, its speed on 0..n workers, its workers) -> what one more is worth; None if it wants no more."""


def climb(jobs: Sequence[JobView], admission: Admission, score: Score) -> dict[str, int]:
    """Return the workers of each admitted job after single workers went to the highest score until none fits.

    Ties go to the job that arrived first. Held jobs stay at their floor. The room is deducted from
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
    """Make a complete decision: minimums first, then one worker at a time to the job that values it most.

    Each worth is multiplied by ``JobView.weight``; a negative worth, which is a cost, is divided by it.

    Args:
        worth: Worth of one more worker; None if the job wants no more.
        say: Reason for a job's size, given its workers and the worth of one more.
        slow_factor: Nodes on which steps take at least this many times longer are avoided; None uses all nodes.
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
    """Return the cluster with slow nodes draining: nodes on which some job saw steps take ``factor`` times longer.

    One slow worker holds up its whole group, so a job is faster without that worker unless it has few others. If
    avoiding the slow nodes would change which jobs are admitted or at what floor, all nodes stay in use.
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
    """Grow jobs one after the other, for policies that compare single slots, if the jobs' workers differ in kind."""
    counts = grow(order, admission)
    why = "workers; workers of several kinds, so jobs grow in turn"
    return {
        view.job: Target(workers=counts[view.job], reason=f"{counts[view.job]} {why}")
        for view in order
        if view.job in counts
    }
