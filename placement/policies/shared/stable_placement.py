"""Shapes of jobs with interchangeable workers, and stable placement: whole nodes first, moving few jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, Shape, shape_goodputs
from placement.cluster.packing import FreeResources, FreeSlots, Occupancy, worst_fit
from placement.goodput.step_time import Floats

MOST_NODES = 16  # of a job
_HORIZON_S = 60.0


class StablePlacer:
    """Placer that tracks free slots per node; jobs are identified by their index in the arguments of ``place``."""

    def __init__(self, slots: Sequence[int], kinds: Sequence[int] | None = None) -> None:
        self._kinds = np.zeros(len(slots), dtype=np.int64) if kinds is None else np.array(kinds, dtype=np.int64)
        self._occupied = Occupancy(FreeSlots(slots))
        self._multi_node_nodes: set[int] = set()

    def place(
        self,
        sizes: Sequence[int],
        present: Sequence[Mapping[int, int]],
        least: Sequence[int],
        kinds: Sequence[int] | None = None,
    ) -> list[dict[int, int]] | None:
        """Return each job's workers, keyed by node index; None if some job gets fewer than its minimum ``least``.

        Jobs are placed in order of decreasing size. A job that keeps its size stays unless a larger job took its nodes.
        A job that moves goes to the node with the fewest workers from jobs that stay, preferring the tightest fit. A
        job that needs several nodes uses as few as possible, preferably without other multi-node jobs; it gets fewer
        workers than its size if room is short.
        """
        wanted = [0] * len(sizes) if kinds is None else list(kinds)
        stays = [
            bool(here) and sum(here.values()) == size and all(self._kinds[node] == kind for node in here)
            for here, size, kind in zip(present, sizes, wanted, strict=True)
        ]
        reserved = np.zeros_like(self._kinds)
        for here, stay in zip(present, stays, strict=True):
            for node, workers in here.items() if stay else ():
                reserved[node] += workers
        # Who stays comes first among equals, multi-node jobs before those within a node.
        order = sorted(range(len(sizes)), key=lambda j: (-sizes[j], not stays[j], j))
        places: list[dict[int, int]] = [{} for _ in sizes]
        for j in order:
            if stays[j]:
                for node, workers in present[j].items():
                    reserved[node] -= workers
                free = self._occupied.slots(j)
                if all(free[node] >= workers for node, workers in present[j].items()):
                    places[j] = dict(present[j])
                    self._occupy(j, places[j])
                    continue
            places[j] = self._find(j, sizes[j], reserved, self._kinds == wanted[j])
            if sum(places[j].values()) < least[j]:
                return None
            self._occupy(j, places[j])
        return places

    def grown(self, job: int, more: int) -> dict[int, int] | None:
        """Return a job's workers by node index, plus ``more`` on one node (its own if possible); None without room."""
        place, free = dict(self._occupied.place(job)), self._occupied.slots(job)
        own = [node for node in place if free[node] >= more]
        if own:
            place[own[0]] += more
            return place
        alike = self._kinds == self._kinds[next(iter(place))] if place else np.ones_like(self._kinds, dtype=np.bool_)
        roomy = [int(node) for node in np.flatnonzero((free >= more) & alike)]
        quiet = [node for node in roomy if node not in self._multi_node_nodes] or roomy
        if not quiet:
            return None
        place[min(quiet, key=lambda node: int(free[node]))] = more
        return place

    def move(self, job: int, place: Mapping[int, int]) -> None:
        """Move one job's workers to ``place``: the number of workers keyed by node index."""
        before = self._occupied.lift(job)
        if len(before) > 1:
            self._multi_node_nodes -= before.keys()
        self._occupy(job, place)

    def _occupy(self, job: int, place: Mapping[int, int]) -> None:
        self._occupied.put_all(job, place)
        if len(place) > 1:
            self._multi_node_nodes.update(place)

    def _find(self, job: int, size: int, reserved: NDArray[np.int64], alike: NDArray[np.bool_]) -> dict[int, int]:
        """Return a place that displaces as few staying workers as possible; it may hold fewer workers than ``size``."""
        free = self._occupied.slots(job)
        fits = np.flatnonzero((free >= size) & alike)
        if len(fits):
            crowd = [(max(0, int(reserved[i]) - int(free[i]) + size), int(free[i]), int(i)) for i in fits]
            return {min(crowd)[2]: size}
        place: dict[int, int] = {}
        missing = size
        nodes = [
            (int(i) in self._multi_node_nodes, -min(int(free[i]), missing), int(reserved[i]), int(i))
            for i in np.flatnonzero((free > 0) & alike)
        ]
        for _, _, _, i in sorted(nodes):
            more = min(missing, int(free[i]))
            place[i] = more
            missing -= more
            if not missing:
                break
        return place


def use_idle(
    running: Sequence[JobView],
    settler: StablePlacer,
    places: list[dict[int, int]],
) -> None:
    """Give idle slots to jobs, one by one, while the speed-up repays the cost of the change within a minute."""
    for i, view in enumerate(running):
        limit = growth_limit(view)
        gain = 1.0 + view.resize_cost_s / _HORIZON_S + 1e-9
        while view.held_at is None and places[i] and sum(places[i].values()) < limit:
            more = settler.grown(i, 1)
            if more is None or len(more) > MOST_NODES:
                break
            before, after = speeds_of(view, (shape_of(places[i]), shape_of(more)))
            if not after > gain * before:
                break
            settler.move(i, more)
            places[i] = more


def restart_factor(view: JobView, now_s: float, least: float) -> float:
    """Return Pollux's restart penalty: (age - d x restarts) / (age + d), with d = ``JobView.resize_cost_s``.

    The result is at least ``least``. It is 1 if both age and d are 0.

    Source: Qiao et al., OSDI 2021, section 4.2.1; Sia uses it too.
    """
    age_s, cost_s = max(now_s - view.submitted_s, 0.0), view.resize_cost_s
    if age_s + cost_s <= 0:
        return 1.0
    return max((age_s - cost_s * view.restarts) / (age_s + cost_s), least)


def shape_of(place: Mapping[int, int]) -> tuple[int, int]:
    """Return the shape (number of nodes, number of workers) of a placement."""
    return len(place), sum(place.values())


def growth_limit(view: JobView) -> int:
    """Return the maximum number of workers for the job: the smaller of its ``useful_workers`` and ``growth_limit``."""
    limit = view.useful_workers
    return limit if view.growth_limit is None else min(limit, view.growth_limit)


def present_place(view: JobView, index: Callable[[str], int | None]) -> dict[int, int]:
    """Return the job's current workers keyed by node index; empty if one of its nodes is gone or draining.

    ``index`` maps a node id to the node's index, or to None if the node is gone or draining.
    """
    place: dict[int, int] = {}
    for node_id, workers in view.allocation.items():
        at = index(node_id)
        if at is None:
            return {}
        place[at] = workers
    return place


def shapes(view: JobView, slots: Sequence[int], most: int) -> tuple[Shape, ...]:
    """Return the shapes (nodes, workers) to consider: all sizes up to one full node, then multiples of a full node."""
    roomy = np.cumsum(sorted(slots, reverse=True))
    if not len(roomy) or roomy[-1] < view.min_workers:
        return ()
    node, most = max(slots), min(most, int(roomy[-1]))
    sizes = {*range(1, node + 1), *range(2 * node, most + 1, node), view.min_workers}
    return tuple(
        (int(np.searchsorted(roomy, size)) + 1, size) for size in sorted(sizes) if view.min_workers <= size <= most
    )


def speeds_of(view: JobView, wanted: tuple[Shape, ...]) -> Floats:
    """Return the goodput of each shape (nodes, workers) relative to the job's minimum size on one node.

    Each shape runs at its best batch. If the minimum size cannot run, speeds are relative to the lowest goodput among
    the shapes. A shape that no batch fits has speed 0. Without a goodput model, speed is the number of workers.
    """
    if view.goodput is None:
        return np.array([workers for _, workers in wanted], dtype=np.float64)
    values = shape_goodputs(view, view.goodput, ((1, view.min_workers), *wanted), view.atomic_bsz_range)
    positive = values[values > 0]
    base = values[0] if values[0] > 0 else (positive.min() if positive.size else 1.0)
    return np.asarray(values[1:] / base)


class WorstFitPlacer:
    """Placer of jobs one by one on the roomiest nodes; running jobs may keep their nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self.free = FreeResources(cluster)
        types = {node.node_id: node.gpu_type for node in cluster.nodes}
        self._types = [types[node_id] for node_id in self.free.node_ids]

    def keep(self, view: JobView) -> Mapping[str, int] | None:
        """Reserve and return the job's current workers keyed by node id; None if not all their slots are free."""
        fits = self.free.slots(view)
        place = {self.free.index(node_id): workers for node_id, workers in view.allocation.items()}
        if any(index is None or fits[index] < workers for index, workers in place.items()):
            return None
        for index, workers in place.items():
            assert index is not None
            self.free.take(view, index, workers)
        return dict(view.allocation)

    def spread(self, view: JobView, workers: int) -> Mapping[str, int] | None:
        """Reserve room on the roomiest nodes of the GPU type with the most room; return workers keyed by node id."""
        fits = self.free.slots(view)
        sums = {gpu: int(fits[self._of(gpu)].sum()) for gpu in dict.fromkeys(self._types)}
        roomiest = max(sums, key=lambda gpu: sums[gpu], default="")
        if not sums or sums[roomiest] < workers:
            return None
        nodes: dict[str, int] = {}
        while workers > 0:
            here = np.where(self._of(roomiest), self.free.slots(view), 0)
            index = worst_fit(here)
            assert index is not None, "the sum of the slots has just been seen to suffice"
            more = min(workers, int(here[index]))
            self.free.take(view, index, more)
            nodes[self.free.node_ids[index]] = nodes.get(self.free.node_ids[index], 0) + more
            workers -= more
        return nodes

    def _of(self, gpu: str) -> NDArray[np.bool_]:
        return np.array([each == gpu for each in self._types], dtype=np.bool_)
