"""Packing of workers onto nodes, with each node's free resources and occupancy during a decision.

``best_fit`` selects the tightest node that holds all workers, so that large gaps are preserved; ``worst_fit`` selects
the roomiest, so that a job spans few nodes. Both are standard in bin packing. The caller decides which jobs keep their
nodes and which are placed first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import TOLERANCE, Allocation, Cluster
from placement.cluster.jobs import JobView, WorkerKind, worker_kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Result of packing: the nodes of placed workers, and the workers that were not placed."""

    allocation: Allocation  # workers per job and node
    short: Mapping[str, int]  # per job, how many of its wanted workers found no place (0 is left out)


def pack(counts: Mapping[str, int], jobs: Sequence[JobView], cluster: Cluster) -> Packing:
    """Place every job's workers on nodes.

    In order of importance: (1) a bundle must fit entirely on one node, and draining nodes get nothing; (2) workers stay
    where they are, and a shrinking job leaves the nodes where it has the fewest; (3) new workers join the job's nodes,
    then as few other nodes as possible, preferring the tightest fit; (4) a node holds at most one multi-node job, as a
    preference that never leaves a worker unplaced. If some workers cannot be placed in this way (bundles of different
    sizes, scattered room), everything is placed again from scratch, largest bundles first, and that result is used if
    it places more. A job that cannot get its minimum gets nothing.

    Returns the placements of all jobs that have any, and the number of workers that were not placed.
    """
    wanted = [view for view in sorted(jobs, key=lambda view: view.arrival) if counts.get(view.job, 0) > 0]
    packing = _place(counts, wanted, cluster, keep=True)
    if packing.short:
        anew = _place(counts, wanted, cluster, keep=False)
        if _missing(anew, counts, wanted) < _missing(packing, counts, wanted):
            return anew
    return packing


def _missing(packing: Packing, counts: Mapping[str, int], jobs: Sequence[JobView]) -> tuple[int, int, int]:
    """Rank a packing: fewest running jobs stopped, then fewest jobs without workers, then fewest workers missing."""
    without = {job for job, short in packing.short.items() if short == counts[job]}
    stopped = sum(1 for view in jobs if view.workers and view.job in without)
    return stopped, len(without), sum(packing.short.values())


def _place(counts: Mapping[str, int], jobs: Sequence[JobView], cluster: Cluster, *, keep: bool) -> Packing:
    """Return placements for all jobs, in one pass or, if a minimum would not be met, in two."""
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
    """Placement of jobs one after another: jobs keep their nodes, and growth uses the best fit."""

    def __init__(self, free: FreeResources) -> None:
        self._free = free
        self.occupied = Occupancy(free)

    def keep(self, view: JobView, wanted: int) -> None:
        """Keep up to ``wanted`` workers where they are, preferring the nodes with the most of them."""
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
        """Add the missing workers: on the job's own nodes, then the tightest node that holds all, else the roomiest."""
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
        """Return the node for the job's next workers; some node must have room."""
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
        """Return the result of the packing; a job below its minimum gets nothing."""
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


Ints: TypeAlias = NDArray[np.int64]

_Job = TypeVar("_Job")
_JobContra = TypeVar("_JobContra", contravariant=True)
_Key = TypeVar("_Key", bound=Hashable)
_KeyCo = TypeVar("_KeyCo", bound=Hashable, covariant=True)


class Free(Protocol[_JobContra, _KeyCo]):
    """Protocol for free room on nodes: ``FreeResources`` if workers differ in kind, else ``FreeSlots``."""

    def key(self, job: _JobContra) -> _KeyCo:
        """Return a key that identifies the job."""
        ...

    def slots(self, job: _JobContra) -> Ints:
        """Return how many more workers of the job fit on each node, in an array that the caller may modify."""
        ...

    def take(self, job: _JobContra, index: int, workers: int) -> None:
        """Reserve room for the job's workers on the node with this index; a negative number releases room."""
        ...


class FreeSlots:
    """Free slots (room for one worker each) on each node, for jobs (identified by number) whose workers are alike."""

    def __init__(self, slots: Sequence[int] | Ints) -> None:
        self._free = np.array(slots, dtype=np.int64)

    def key(self, job: int) -> int:
        """Return the job's number, which is its key."""
        return job

    def slots(self, job: int) -> Ints:
        """Return the number of free slots on each node, which is the same for every job."""
        return self._free.copy()

    def take(self, job: int, index: int, workers: int) -> None:
        """Reserve slots for the job's workers on the node with this index; a negative number releases slots."""
        self._free[index] -= workers


class Occupancy(Generic[_Job, _Key]):
    """Each job's workers on each node, with the room that is left.

    Args:
        free: Remaining room on the nodes. After construction, it must be changed only through this object.
    """

    def __init__(self, free: Free[_Job, _Key]) -> None:
        self._free = free
        self._places: dict[_Key, dict[int, int]] = {}
        self._on: dict[int, set[_Key]] = {}
        self._multi_node: set[_Key] = set()

    def slots(self, job: _Job) -> Ints:
        """Return how many more workers of the job fit on each node."""
        return self._free.slots(job)

    def place(self, job: _Job) -> Mapping[int, int]:
        """Return the number of the job's workers, keyed by node index; empty if it has none."""
        return self._places.get(self._free.key(job), {})

    def workers(self, job: _Job) -> int:
        """Return the number of the job's workers."""
        return sum(self.place(job).values())

    def put(self, job: _Job, index: int, workers: int) -> None:
        """Add workers for the job on one node, without checking that they fit (see ``slots``)."""
        self._free.take(job, index, workers)
        key = self._free.key(job)
        place = self._places.setdefault(key, {})
        place[index] = place.get(index, 0) + workers
        self._on.setdefault(index, set()).add(key)
        if len(place) > 1:
            self._multi_node.add(key)

    def put_all(self, job: _Job, place: Mapping[int, int]) -> None:
        """Add workers for the job on several nodes."""
        for index, workers in place.items():
            self.put(job, index, workers)

    def lift(self, job: _Job) -> dict[int, int]:
        """Remove the job from its nodes, and return its former workers keyed by node index."""
        key = self._free.key(job)
        place = self._places.pop(key, {})
        self._multi_node.discard(key)
        for index, workers in place.items():
            self._free.take(job, index, -workers)
            self._on[index].discard(key)
        return place

    def on(self, index: int) -> frozenset[_Key]:
        """Return the keys of the jobs that have workers on the node with this index."""
        return frozenset(self._on.get(index, ()))

    def multi_node_nodes(self, beside: _Job | None = None) -> set[int]:
        """Return the indices of nodes used by multi-node jobs other than the job ``beside``."""
        own = None if beside is None else self._free.key(beside)
        return {index for key in self._multi_node if key != own for index in self._places[key]}


def best_fit(fits: NDArray[np.int64], wanted: int) -> int | None:
    """Return the index of the node with the least room that still holds ``wanted`` workers; None if none does.

    ``fits`` is the number of workers that fit on each node. Ties go to the first node.
    """
    enough = fits >= wanted
    return int(np.argmin(np.where(enough, fits, np.iinfo(np.int64).max))) if enough.any() else None


def worst_fit(fits: NDArray[np.int64]) -> int | None:
    """Return the index of the node with the most room, given the workers that fit on each; None if all are full."""
    index = int(np.argmax(fits)) if len(fits) else 0
    return index if len(fits) and fits[index] > 0 else None


def mask(indices: Mapping[int, int] | set[int], length: int) -> NDArray[np.bool_]:
    """Return a mask over `length` nodes that is True at `indices`."""
    found = np.zeros(length, dtype=np.bool_)
    found[list(indices)] = True
    return found


_FEW = 16  # changed nodes up to which they are looked at one by one


@dataclasses.dataclass(slots=True)
class _KindSlots:
    """Slots for workers with one bundle and label selector. Thousands of jobs share a few kinds."""

    needs: tuple[tuple[int, float], ...] | None  # column and amount of each resource; None if no node has one of them
    share: float  # dominant share of one worker
    matching: NDArray[np.bool_] | None  # nodes with the labels that are asked for; None for all
    slots: NDArray[np.int64]  # how many more fit on each node, after ``seen`` of the changes
    seen: int  # see there


class FreeResources:
    """Unused resources per node, updated during a decision so that it never assigns more workers than fit.

    Draining nodes are left out. Nodes are indexed in the order of ``node_ids``.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._nodes = tuple(node for node in cluster.nodes if not node.draining)
        self.node_ids = tuple(node.node_id for node in self._nodes)
        self._index = {node_id: index for index, node_id in enumerate(self.node_ids)}
        self._names = sorted({name for node in self._nodes for name in node.free})
        self._free = np.array(
            [[node.free.get(name, 0.0) for name in self._names] for node in self._nodes], dtype=np.float64
        ).reshape(len(self._nodes), len(self._names))
        self._total = self._free.sum(axis=0)
        self._kinds: dict[WorkerKind, _KindSlots] = {}
        self._changed: list[int] = []  # the node of every change, so that slots are not counted anew for all nodes

    def key(self, view: JobView) -> str:
        """Return the job's name, which identifies it."""
        return view.job

    def index(self, node_id: str) -> int | None:
        """Return the index of a node; None if it is gone or draining."""
        return self._index.get(node_id)

    def slots(self, view: JobView) -> NDArray[np.int64]:
        """Return how many more workers of the job fit on each node, in the order of ``node_ids``."""
        kind = self._kind(view)
        if kind.needs is not None and kind.seen < len(self._changed):
            changed = self._changed[kind.seen :]
            if len(changed) > _FEW:
                kind.slots = self._count(kind.needs, kind.matching)
            else:
                for index in changed:
                    kind.slots[index] = self._count_on(index, kind.needs, kind.matching)
            kind.seen = len(self._changed)
        return kind.slots.copy()

    def take(self, view: JobView, index: int, workers: float) -> None:
        """Reserve resources for workers on the node with this index, unchecked; a negative number releases them."""
        needs = self._kind(view).needs
        assert needs is not None, f"job {view.job} has no slot to take"
        for column, amount in needs:
            self._free[index, column] -= workers * amount
        self._changed.append(index)

    def add(self, view: JobView, workers: int) -> bool:
        """Reserve room for all workers, the tightest nodes first, and return True; if not all fit, reserve none."""
        fits = self.slots(view)
        if int(fits.sum()) < workers:
            return False
        fits[fits == 0] = np.iinfo(np.int64).max
        while workers > 0:
            index = int(fits.argmin())
            here = min(workers, int(fits[index]))
            self.take(view, index, here)
            fits[index] = np.iinfo(np.int64).max
            workers -= here
        return True

    def share(self, view: JobView) -> float:
        """Return one worker's dominant share: the largest fraction of any cluster resource that it uses."""
        return self._kind(view).share

    def _kind(self, view: JobView) -> _KindSlots:
        key = worker_kind(view)
        if key not in self._kinds:
            self._kinds[key] = self._new_kind(view)
        return self._kinds[key]

    def _new_kind(self, view: JobView) -> _KindSlots:
        """Return the slots for the job's kind of worker, counted on all nodes.

        If no node has one of the resources, ``needs`` is None and there are no slots.
        """
        wanted = {name: amount for name, amount in view.bundle.items() if amount > 0}
        matching = None
        if view.selector:
            matching = np.array([node.matches(view.selector) for node in self._nodes], dtype=np.bool_)
        if not all(name in self._names for name in wanted):
            nothing = np.zeros(len(self._nodes), dtype=np.int64)
            return _KindSlots(needs=None, share=1.0, matching=matching, slots=nothing, seen=0)
        needs = tuple((self._names.index(name), float(amount)) for name, amount in wanted.items())
        share = max(amount / max(float(self._total[column]), TOLERANCE) for column, amount in needs)
        slots = self._count(needs, matching)
        return _KindSlots(needs=needs, share=share, matching=matching, slots=slots, seen=len(self._changed))

    def _count(self, needs: tuple[tuple[int, float], ...], matching: NDArray[np.bool_] | None) -> NDArray[np.int64]:
        fits = np.floor(self._free[:, [c for c, _ in needs]] / [amount for _, amount in needs] + TOLERANCE).min(axis=1)
        if matching is not None:
            fits = np.where(matching, fits, 0.0)
        slots: NDArray[np.int64] = np.maximum(fits, 0.0).astype(np.int64)
        return slots

    def _count_on(self, index: int, needs: tuple[tuple[int, float], ...], matching: NDArray[np.bool_] | None) -> int:
        if matching is not None and not matching[index]:
            return 0
        free = self._free[index].tolist()
        return max(min(int(free[column] / amount + TOLERANCE) for column, amount in needs), 0)
