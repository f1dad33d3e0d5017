"""Start times of waiting jobs, predicted from the ends of running jobs, which release their slots (pure)."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence

from placement.cluster.cluster import Cluster
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView, WorkerKind, goodputs, worker_kind
from placement.goodput.remaining import remaining


def start_times(
    waiting: Sequence[JobView], running: Sequence[tuple[JobView, Mapping[str, int]]], cluster: Cluster
) -> dict[str, float]:
    """Return the time from now until each waiting job's smallest size fits [s].

    Jobs whose start cannot be predicted are left out.

    The estimate is rough: every running job keeps its current size and goodput until its end; a job without a declared
    length or a fitted model never ends; nodes and the set of jobs do not change, and jobs started here do not end.
    Waiting jobs are served by priority, then by arrival; among jobs with the same kind of worker, each waits for
    those before it.

    Args:
        running: Running jobs, with their workers by node id.
        cluster: The nodes, with all resources that elastic jobs may use.
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
    for node, workers in target.items():
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
