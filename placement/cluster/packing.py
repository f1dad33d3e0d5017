"""Packing of decided worker counts onto nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Allocation, Cluster
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView
from placement.cluster.occupancy import Occupancy, best_fit, mask, worst_fit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Result of packing: the nodes of the workers.

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

    Returns the places, and what found none. Every job appears that has a place.
    """
    wanted = [view for view in sorted(jobs, key=lambda view: view.arrival) if counts.get(view.job, 0) > 0]
    packing = _place(counts, wanted, cluster, keep=True)
    if packing.short:
        anew = _place(counts, wanted, cluster, keep=False)
        if _missing(anew, counts, wanted) < _missing(packing, counts, wanted):
            return anew
    return packing


def _missing(packing: Packing, counts: Mapping[str, int], jobs: Sequence[JobView]) -> tuple[int, int, int]:
    """Fewer running jobs without any worker is better, then fewer of all jobs, then fewer workers missing."""
    without = {job for job, short in packing.short.items() if short == counts[job]}
    stopped = sum(1 for view in jobs if view.workers and view.job in without)
    return stopped, len(without), sum(packing.short.values())


def _place(counts: Mapping[str, int], jobs: Sequence[JobView], cluster: Cluster, *, keep: bool) -> Packing:
    """Places for all, in one pass or, where a minimum is at stake, in two."""
    free = FreeResources(cluster)
    packer = _Packer(free)
    if keep:
        for view in jobs:
            packer.keep(view, counts[view.job])

    def order(view: JobView) -> tuple[float, float, int, tuple[float, str]]:
        # Minimums before growth, so that scattered room never costs a job its whole place; large pieces
        # first, and of equal ones those that fewer nodes can hold.
        reach = int(np.count_nonzero(free.slots(view)))
        return (-free.share(view), -free.share(view) * counts[view.job], reach, view.arrival)

    ranked = sorted(jobs, key=order)
    # A job in one piece is best placed at once; only when minimums are at stake are they placed before all
    # growth.
    for view in ranked:
        packer.grow(view, counts[view.job])
    if any(packer.occupied.workers(view) < min(view.min_workers, counts[view.job]) for view in jobs):
        packer = _minimums_first(counts, jobs, ranked, cluster, keep=keep)
    return packer.packing(counts, jobs)


def _minimums_first(
    counts: Mapping[str, int], jobs: Sequence[JobView], ranked: Sequence[JobView], cluster: Cluster, *, keep: bool
) -> _Packer:
    """Pack in two passes: all jobs' minimums, then growth."""
    packer = _Packer(FreeResources(cluster))
    floors = {view.job: min(view.min_workers, counts[view.job]) for view in jobs}
    for sizes in (floors, counts):
        if keep:
            for view in jobs:
                packer.keep(view, sizes[view.job])
        for view in ranked:
            packer.grow(view, sizes[view.job])
    return packer


class _Packer:
    """Places jobs one after the other: who has a node keeps it, and growth fits best."""

    def __init__(self, free: FreeResources) -> None:
        self._free = free
        self.occupied = Occupancy(free)

    def keep(self, view: JobView, wanted: int) -> None:
        """Leave as many workers as wanted where they are, on the nodes with most of them."""
        if not view.allocation:
            return
        fits = self.occupied.slots(view)
        here = [(workers, node_id) for node_id, workers in view.allocation.items()]
        for workers, node_id in sorted(here, key=lambda item: (-item[0], item[1])):
            index = self._free.index(node_id)
            if index is None:
                continue
            placed = self.occupied.place(view)
            stay = min(workers - placed.get(index, 0), wanted - sum(placed.values()), int(fits[index]))
            if stay > 0:
                self.occupied.put(view, index, stay)

    def grow(self, view: JobView, wanted: int) -> None:
        """Add the missing workers: own nodes, then the tightest node that takes all, else the roomiest."""
        missing = wanted - self.occupied.workers(view)
        while missing > 0:
            fits = self.occupied.slots(view)
            if not fits.any():
                return
            index = self._next_node(view, missing, fits)
            more = min(missing, int(fits[index]))
            self.occupied.put(view, index, more)
            missing -= more

    def _next_node(self, view: JobView, missing: int, fits: NDArray[np.int64]) -> int:
        """Return the node for the job's next workers; some node has room for one."""
        own = mask(self.occupied.place(view), len(fits))
        candidates = fits > 0
        if (candidates & own).any():
            candidates = candidates & own
        elif own.any() or not (fits >= missing).any():
            # It is going to span nodes: keep away from nodes that another such job uses, if there are others.
            quiet = candidates & ~mask(self.occupied.multi_node_nodes(view), len(fits))
            candidates = quiet if quiet.any() else candidates
        offered = np.where(candidates, fits, 0)
        index = best_fit(offered, missing)
        index = worst_fit(offered) if index is None else index
        assert index is not None, f"no node has room for a worker of job {view.job}"
        return index

    def packing(self, counts: Mapping[str, int], jobs: Sequence[JobView]) -> Packing:
        """Return the result of the packing; a job with less than its minimum has nothing."""
        allocation: dict[str, dict[str, int]] = {}
        short: dict[str, int] = {}
        for view in jobs:
            place = self.occupied.place(view)
            workers = sum(place.values()) if sum(place.values()) >= view.min_workers else 0
            if workers < counts[view.job]:
                short[view.job] = counts[view.job] - workers
            if workers:
                allocation[view.job] = {self._free.node_ids[i]: n for i, n in sorted(place.items())}
        return Packing(allocation=allocation, short=short)
