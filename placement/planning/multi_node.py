"""At most one job that spans several nodes on any node (Pollux's rule: such jobs would share its network)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Allocation, AllocationError, Cluster
from placement.cluster.free_slots import Room
from placement.cluster.jobs import JobView
from placement.cluster.packing import Packing

WorkersByNode = Mapping[str, int]
"""Workers by node id."""


def shared(allocation: Allocation) -> dict[str, list[str]]:
    """Nodes that two or more spanning jobs share, and these jobs."""
    return {node: jobs for node, jobs in sorted(_spanning(allocation).items()) if len(jobs) > 1}


def check_apart(allocation: Allocation) -> None:
    """Refuse nodes that spanning jobs share.

    Raises:
        AllocationError: naming the node and the jobs.
    """
    for node, jobs in shared(allocation).items():
        raise AllocationError("one multi-node job per node", f"node {node!r} holds workers of {' and '.join(jobs)}")


def keep_apart(packing: Packing, views: Sequence[JobView], cluster: Cluster, spanned: Collection[str] = ()) -> Packing:
    """The same sizes at other places, where spanning jobs share a node, and smaller sizes where there are none.

    Jobs within one node stay, and of those that conflict the one that is there already, then the largest. The others
    are placed anew: on one node that takes them whole, else on nodes without a spanning job. If that leaves a job
    without its minimum, all are placed anew, minimums first, and that is taken if it leaves out fewer.

    Args:
        packing: places to start from.
        views: the jobs.
        cluster: the nodes.
        spanned: nodes that another spanning job is on already.
    """
    busy = _spanning(packing.allocation)
    if all(len(jobs) + (node in spanned) < 2 for node, jobs in busy.items()):
        return packing
    jobs = {view.job: view for view in views if view.job in packing.allocation}
    wanted = {job: sum(place.values()) for job, place in packing.allocation.items()}
    moved = _move_some(packing.allocation, jobs, wanted, cluster, spanned)
    if any(job not in moved for job in jobs):
        anew = _place_all(packing.allocation, jobs, wanted, cluster, spanned)
        moved = max(moved, anew, key=lambda found: (len(found), sum(sum(each.values()) for each in found.values())))
    missing = {job: wanted[job] - sum(moved.get(job, {}).values()) for job in jobs}
    short = dict(packing.short)
    for job, workers in missing.items():
        if workers:
            short[job] = short.get(job, 0) + workers
    return Packing(allocation=moved, short=short)


def _spanning(allocation: Allocation) -> dict[str, list[str]]:
    """Spanning jobs by node."""
    found: dict[str, list[str]] = {}
    for job, place in allocation.items():
        for node in place if len(place) > 1 else ():
            found.setdefault(node, []).append(job)
    return found


def _move_some(
    places: Allocation,
    jobs: Mapping[str, JobView],
    wanted: Mapping[str, int],
    cluster: Cluster,
    spanned: Collection[str],
) -> dict[str, WorkersByNode]:
    board = _Board(cluster, spanned)
    order = sorted(
        jobs.values(),
        key=lambda v: (len(places[v.job]) > 1, places[v.job] != dict(v.allocation), -wanted[v.job], v.arrival),
    )
    homeless = []
    for view in order:
        if len(places[view.job]) == 1 or not board.spanned & set(places[view.job]):
            board.put(view, places[view.job])
        else:
            homeless.append(view)
    for view in homeless:
        board.put(view, board.find(view, wanted[view.job], view.allocation or places[view.job]))
    return board.places


def _place_all(
    places: Allocation,
    jobs: Mapping[str, JobView],
    wanted: Mapping[str, int],
    cluster: Cluster,
    spanned: Collection[str],
) -> dict[str, WorkersByNode]:
    board = _Board(cluster, spanned)
    empty = Room(cluster)
    largest = {job: int(empty.slots(view).max(initial=0)) for job, view in jobs.items()}
    # Jobs that cannot but span come first: for them few nodes will do.
    order = sorted(jobs.values(), key=lambda v: (v.min_workers <= largest[v.job], -v.min_workers, v.arrival))
    for view in order:
        board.put(view, board.find(view, view.min_workers, view.allocation or places[view.job]))
    for view in order:
        small = board.lift(view)
        large = board.find(view, wanted[view.job], small or places[view.job])
        board.put(view, large if sum(large.values()) >= sum(small.values()) else small)
    return board.places


class _Board:
    """Room, places and spanned nodes while jobs are placed."""

    def __init__(self, cluster: Cluster, spanned: Collection[str]) -> None:
        self.room = Room(cluster)
        self.places: dict[str, WorkersByNode] = {}
        self._others = frozenset(spanned)

    @property
    def spanned(self) -> set[str]:
        """Nodes that carry a spanning job."""
        return set(self._others).union(*(place for place in self.places.values() if len(place) > 1))

    def put(self, view: JobView, place: WorkersByNode) -> None:
        """Seat a job; an empty place is none."""
        if place:
            self._take(view, place, 1)
            self.places[view.job] = place

    def lift(self, view: JobView) -> WorkersByNode:
        """Take a job from its place."""
        place = self.places.pop(view.job, {})
        self._take(view, place, -1)
        return place

    def find(self, view: JobView, wanted: int, own: WorkersByNode) -> WorkersByNode:
        """The best place for as many of the wanted workers as possible; empty if it is below the job's minimum."""
        fits = self.room.slots(view)
        single = self._on_one_node(fits, wanted, own)
        if sum(single.values()) < wanted:
            several = self._on_quiet_nodes(fits, wanted, own)
            single = several if sum(several.values()) > sum(single.values()) else single
        return single if sum(single.values()) >= view.min_workers else {}

    def _on_one_node(self, fits: NDArray[np.int64], wanted: int, own: WorkersByNode) -> WorkersByNode:
        """Its own node if that takes all, else the tightest that does, else the roomiest."""
        enough = fits >= wanted
        if not enough.any():
            at = int(np.argmax(fits)) if len(fits) else 0
            return {self.room.node_ids[at]: int(fits[at])} if len(fits) and fits[at] else {}
        mine = [i for i in np.flatnonzero(enough).tolist() if self.room.node_ids[i] in own]
        at = mine[0] if mine else int(np.argmin(np.where(enough, fits, np.iinfo(np.int64).max)))
        return {self.room.node_ids[at]: wanted}

    def _on_quiet_nodes(self, fits: NDArray[np.int64], wanted: int, own: WorkersByNode) -> WorkersByNode:
        """Its own nodes, then the roomiest, without those that carry a spanning job."""
        busy = self.spanned
        quiet = [i for i in np.flatnonzero(fits).tolist() if self.room.node_ids[i] not in busy]
        place: dict[str, int] = {}
        for i in sorted(quiet, key=lambda i: (self.room.node_ids[i] not in own, -int(fits[i]), i)):
            here = min(wanted - sum(place.values()), int(fits[i]))
            if here <= 0:
                break
            place[self.room.node_ids[i]] = here
        return place

    def _take(self, view: JobView, place: WorkersByNode, sign: int) -> None:
        for node, workers in place.items():
            index = self.room.index(node)
            assert index is not None, f"job {view.job} is placed on {node}, which offers nothing"
            self.room.take(view, index, sign * workers)
