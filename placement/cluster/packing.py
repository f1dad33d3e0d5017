"""From counts to nodes: how many workers each job gets is decided, now where they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Allocation, Cluster
from placement.cluster.free_slots import Room
from placement.cluster.jobs import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the workers go.

    Attributes:
        allocation: workers per job and node.
        short: per job, how many of its wanted workers found no place (0 is left out).
    """

    allocation: Allocation
    short: Mapping[str, int]


def pack(counts: Mapping[str, int], jobs: Sequence[JobView], cluster: Cluster) -> Packing:
    """Place every job's workers.

    In the order of importance: (1) a bundle fits whole on its node, and draining nodes get nothing; (2)
    workers stay where they are, and a shrinking job leaves the nodes where it has fewest; (3) new workers
    join the nodes that the job has, then as few others as possible, the tightest that suffices; (4) a node
    carries at most one job that spans several nodes, a preference only: it never leaves a worker without a
    place. Only if workers find no place that way (bundles of different sizes, scattered room) everything is
    placed anew, largest bundles first, and that is taken if it places more. A job that finds less than its
    minimum gets nothing.

    Args:
        counts: wanted workers per job; jobs that are left out get none.
        jobs: the jobs, with ``allocation`` as the present place of their workers.
        cluster: the nodes.

    Returns:
        The places, and what found none. Every job appears that has a place.
    """
    wanted = [view for view in sorted(jobs, key=lambda view: view.arrival) if counts.get(view.job, 0) > 0]
    packing = _place(counts, wanted, cluster, keep=True)
    if packing.short:
        anew = _place(counts, wanted, cluster, keep=False)
        if _missing(anew, counts) < _missing(packing, counts):
            return anew
    return packing


def _missing(packing: Packing, counts: Mapping[str, int]) -> tuple[int, int]:
    """Fewer jobs without any worker is better, then fewer workers missing."""
    return (
        sum(1 for job, short in packing.short.items() if short == counts[job]),
        sum(packing.short.values()),
    )


class _Board:
    """Workers per job and node while packing, with the room that is left."""

    def __init__(self, cluster: Cluster) -> None:
        self.room = Room(cluster)
        self.placed: dict[str, NDArray[np.int64]] = {}

    def put(self, view: JobView, index: int, workers: int) -> None:
        """Place workers (or remove them, when negative) on one node."""
        self.room.take(view, index, workers)
        self.of(view)[index] += workers

    def of(self, view: JobView) -> NDArray[np.int64]:
        """The job's workers per node."""
        return self.placed.setdefault(view.job, np.zeros(len(self.room.node_ids), dtype=np.int64))

    def crowded(self, view: JobView) -> NDArray[np.bool_]:
        """Nodes that already carry another job spanning several nodes."""
        spanning = [row for job, row in self.placed.items() if job != view.job and np.count_nonzero(row) > 1]
        return np.any([row > 0 for row in spanning], axis=0) if spanning else np.zeros(len(self.of(view)), np.bool_)


def _place(counts: Mapping[str, int], jobs: Sequence[JobView], cluster: Cluster, *, keep: bool) -> Packing:
    board = _Board(cluster)
    if keep:
        for view in jobs:
            _keep(view, counts[view.job], board)

    def order(view: JobView) -> tuple[float, float, tuple[float, str]]:
        # Minimums before growth, so that scattered room never costs a job its whole place; large pieces
        # first.
        return (-board.room.share(view), -board.room.share(view) * counts[view.job], view.arrival)

    ranked = sorted(jobs, key=order)
    # A job in one piece is best placed at once; only when minimums are at stake are they placed before all
    # growth.
    for view in ranked:
        _grow(view, counts[view.job], board)
    if any(board.of(view).sum() < min(view.min_workers, counts[view.job]) for view in jobs):
        board = _minimums_first(counts, jobs, ranked, cluster, keep=keep)
    return _result(counts, jobs, board)


def _minimums_first(
    counts: Mapping[str, int],
    jobs: Sequence[JobView],
    ranked: Sequence[JobView],
    cluster: Cluster,
    *,
    keep: bool,
) -> _Board:
    """The same in two passes: everybody's minimum, then growth."""
    board = _Board(cluster)
    floors = {view.job: min(view.min_workers, counts[view.job]) for view in jobs}
    for sizes in (floors, counts):
        if keep:
            for view in jobs:
                _keep(view, sizes[view.job], board)
        for view in ranked:
            _grow(view, sizes[view.job], board)
    return board


def _result(counts: Mapping[str, int], jobs: Sequence[JobView], board: _Board) -> Packing:
    allocation: dict[str, dict[str, int]] = {}
    short: dict[str, int] = {}
    for view in jobs:
        row = board.of(view)
        workers = int(row.sum()) if row.sum() >= view.min_workers else 0
        if workers < counts[view.job]:
            short[view.job] = counts[view.job] - workers
        if workers:
            allocation[view.job] = {board.room.node_ids[i]: int(row[i]) for i in np.flatnonzero(row)}
    return Packing(allocation=allocation, short=short)


def _keep(view: JobView, wanted: int, board: _Board) -> None:
    """Leave as many workers as wanted where they are, on the nodes with most of them."""
    if not view.allocation:
        return
    fits = board.room.slots(view)
    here = [(workers, node_id) for node_id, workers in view.allocation.items()]
    for workers, node_id in sorted(here, key=lambda item: (-item[0], item[1])):
        index = board.room.index(node_id)
        if index is None:
            continue
        placed = board.of(view)
        stay = min(workers - int(placed[index]), wanted - int(placed.sum()), int(fits[index]))
        if stay > 0:
            board.put(view, index, stay)


def _grow(view: JobView, wanted: int, board: _Board) -> None:
    """Add the missing workers: own nodes, then the tightest node that takes all, else the roomiest."""
    missing = wanted - int(board.of(view).sum())
    while missing > 0:
        fits = board.room.slots(view)
        if not fits.any():
            return
        index = _next_node(view, missing, fits, board)
        more = min(missing, int(fits[index]))
        board.put(view, index, more)
        missing -= more


def _next_node(view: JobView, missing: int, fits: NDArray[np.int64], board: _Board) -> int:
    own = board.of(view) > 0
    candidates = fits > 0
    if (candidates & own).any():
        candidates = candidates & own
    elif own.any() or not (fits >= missing).any():
        # It is going to span nodes: keep away from nodes that another such job uses, if there are others.
        quiet = candidates & ~board.crowded(view)
        candidates = quiet if quiet.any() else candidates
    enough = candidates & (fits >= missing)
    if enough.any():
        return int(np.argmin(np.where(enough, fits, np.iinfo(np.int64).max)))
    return int(np.argmax(np.where(candidates, fits, -1)))
