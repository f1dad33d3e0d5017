"""Placement with at most one multi-node job per node, since such jobs would share its network (Pollux's rule)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Allocation, AllocationError, Cluster
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources, Occupancy, Packing, best_fit, worst_fit

WorkersByNode = Mapping[str, int]
"""Workers by node id."""


def held_up(views: Sequence[JobView]) -> bool:
    """True if at least two jobs have measured that links between nodes slow them down.

    A job counts if it has trained on several nodes and, according to its model, synchronisation across nodes takes
    longer than computation, even with its largest batch per worker: alpha_n + beta_n (R - 2) > alpha_c + beta_c m. R is
    the largest number of workers that it has measured on several nodes. Its current number of workers cannot be used
    instead, because this function's result changes that number, so decisions would alternate.
    """
    return sum(map(_is_held_up, views)) > 1


def _is_held_up(view: JobView) -> bool:
    """True if this job has trained on several nodes and is slowed down by the links between them; see ``held_up``."""
    if view.goodput is None or view.atomic_bsz_range is None:
        return False
    measured = [seen.replicas for several in view.observations.values() for seen in several if seen.nodes > 1]
    if not measured:
        return False
    model, most = view.goodput.throughput_model, view.atomic_bsz_range[1]
    synchronising = model.alpha_n + model.beta_n * max(max(measured) - 2, 0)
    return synchronising > model.alpha_c + model.beta_c * most


def shared(allocation: Allocation) -> dict[str, list[str]]:
    """Return the names of multi-node jobs that share a node with another multi-node job, keyed by that node."""
    return {node: jobs for node, jobs in sorted(_multi_node_jobs(allocation).items()) if len(jobs) > 1}


def check_apart(allocation: Allocation) -> None:
    """Raise AllocationError, naming the node and the jobs, if several multi-node jobs share a node."""
    for node, jobs in shared(allocation).items():
        raise AllocationError("one multi-node job per node", f"node {node!r} holds workers of {' and '.join(jobs)}")


def keep_apart(
    packing: Packing, views: Sequence[JobView], cluster: Cluster, multi_node_nodes: Collection[str] = ()
) -> Packing:
    """Return a packing where no two multi-node jobs share a node, with smaller sizes if room is short.

    Single-node jobs stay. Among conflicting jobs, a job that keeps its current nodes has precedence, then the largest.
    Every other job moves to a node that holds all its workers, or else to nodes without a multi-node job. If that
    leaves a job without its minimum, all jobs are placed again, minimums first, and the result is used if it leaves out
    fewer jobs.

    Args:
        multi_node_nodes: Nodes that already hold workers of a multi-node job that is not in ``views``.
    """
    busy = _multi_node_jobs(packing.allocation)
    if all(len(jobs) + (node in multi_node_nodes) < 2 for node, jobs in busy.items()):
        return packing
    jobs = [view for view in views if view.job in packing.allocation]
    wanted = {job: sum(place.values()) for job, place in packing.allocation.items()}
    placer = _Placer(cluster, multi_node_nodes, packing.allocation, wanted)
    placer.move_some(jobs)
    moved = placer.allocation(jobs)
    if len(moved) < len(jobs):
        placer = _Placer(cluster, multi_node_nodes, packing.allocation, wanted)
        placer.place_all(jobs)
        anew = placer.allocation(jobs)
        moved = max(moved, anew, key=lambda found: (len(found), sum(sum(each.values()) for each in found.values())))
    missing = {job: workers - sum(moved.get(job, {}).values()) for job, workers in wanted.items()}
    short = dict(packing.short)
    for job, workers in missing.items():
        if workers:
            short[job] = short.get(job, 0) + workers
    return Packing(allocation=moved, short=short)


def _multi_node_jobs(allocation: Allocation) -> dict[str, list[str]]:
    """Return multi-node jobs, keyed by node."""
    found: dict[str, list[str]] = {}
    for job, place in allocation.items():
        for node in place if len(place) > 1 else ():
            found.setdefault(node, []).append(job)
    return found


class _Placer:
    """Placement of multi-node jobs on separate nodes: best fit on one node, else worst fit on several."""

    def __init__(
        self, cluster: Cluster, multi_node_nodes: Collection[str], present: Allocation, wanted: Mapping[str, int]
    ) -> None:
        self._free = FreeResources(cluster)
        self._occupied = Occupancy(self._free)
        self._others = {index for node in multi_node_nodes if (index := self._free.index(node)) is not None}
        self._present, self._wanted = present, wanted

    def move_some(self, jobs: Sequence[JobView]) -> None:
        """Move only jobs that conflict with another job; the others stay."""
        places, wanted = self._present, self._wanted
        order = sorted(
            jobs, key=lambda v: (len(places[v.job]) > 1, places[v.job] != dict(v.allocation), -wanted[v.job], v.arrival)
        )
        homeless = []
        for view in order:
            here = self._indices(view, places[view.job])
            if len(here) == 1 or not self._multi_node_nodes() & set(here):
                self._occupied.put_all(view, here)
            else:
                homeless.append(view)
        for view in homeless:
            self._occupied.put_all(view, self._find(view, wanted[view.job], view.allocation or places[view.job]))

    def place_all(self, jobs: Sequence[JobView]) -> None:
        """Place all jobs again from scratch, minimums first."""
        largest = {view.job: int(self._free.slots(view).max(initial=0)) for view in jobs}
        # Jobs that cannot but span come first: for them few nodes will do.
        order = sorted(jobs, key=lambda v: (v.min_workers <= largest[v.job], -v.min_workers, v.arrival))
        for view in order:
            own = view.allocation or self._present[view.job]
            self._occupied.put_all(view, self._find(view, view.min_workers, own))
        for view in order:
            small = self._occupied.lift(view)
            own = self._named(small) or self._present[view.job]
            large = self._find(view, self._wanted[view.job], own)
            self._occupied.put_all(view, large if sum(large.values()) >= sum(small.values()) else small)

    def allocation(self, jobs: Sequence[JobView]) -> dict[str, WorkersByNode]:
        """Return the nodes of the jobs that have been placed."""
        return {view.job: self._named(place) for view in jobs if (place := self._occupied.place(view))}

    def _find(self, view: JobView, wanted: int, own: WorkersByNode) -> dict[int, int]:
        """Return the best placement for as many of the wanted workers as possible; empty below the job's minimum."""
        fits = self._occupied.slots(view)
        mine = {index for node in own if (index := self._free.index(node)) is not None}
        found = _on_one_node(fits, wanted, mine)
        if sum(found.values()) < wanted:
            several = _on_quiet_nodes(fits, wanted, mine, self._multi_node_nodes())
            found = several if sum(several.values()) > sum(found.values()) else found
        return found if sum(found.values()) >= view.min_workers else {}

    def _multi_node_nodes(self) -> set[int]:
        return self._others | self._occupied.multi_node_nodes()

    def _indices(self, view: JobView, place: WorkersByNode) -> dict[int, int]:
        found = {}
        for node, workers in place.items():
            index = self._free.index(node)
            assert index is not None, f"job {view.job} is placed on {node}, which offers nothing"
            found[index] = workers
        return found

    def _named(self, place: Mapping[int, int]) -> dict[str, int]:
        return {self._free.node_ids[index]: workers for index, workers in place.items()}


def _on_one_node(fits: NDArray[np.int64], wanted: int, own: Collection[int]) -> dict[int, int]:
    """Return the job's own node if all workers fit on it, else the tightest fit, else the roomiest node."""
    mine = [index for index in np.flatnonzero(fits >= wanted).tolist() if index in own]
    index = mine[0] if mine else best_fit(fits, wanted)
    if index is not None:
        return {index: wanted}
    index = worst_fit(fits)
    return {} if index is None else {index: int(fits[index])}


def _on_quiet_nodes(
    fits: NDArray[np.int64], wanted: int, own: Collection[int], multi_node_nodes: Collection[int]
) -> dict[int, int]:
    """Return the job's own nodes, then the roomiest, excluding those that hold a multi-node job."""
    quiet = [index for index in np.flatnonzero(fits).tolist() if index not in multi_node_nodes]
    place: dict[int, int] = {}
    for index in sorted(quiet, key=lambda index: (index not in own, -int(fits[index]), index)):
        here = min(wanted - sum(place.values()), int(fits[index]))
        if here <= 0:
            break
        place[index] = here
    return place
