"""From sizes to nodes for equal workers: whole nodes first, moving as few running jobs as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.jobs import JobView
from placement.policies.shapes import speeds_of


class Settler:
    """Slots of the nodes while jobs settle on them.

    Args:
        slots: workers that each node can hold.
        kinds: a number for each node; a job stays within one kind. All are of one kind by default.
    """

    def __init__(self, slots: Sequence[int], kinds: Sequence[int] | None = None) -> None:
        self._kinds = np.zeros(len(slots), dtype=np.int64) if kinds is None else np.array(kinds, dtype=np.int64)
        self._slots = np.array(slots, dtype=np.int64)
        self._free = self._slots.copy()
        self._spanned: set[int] = set()

    def place(
        self,
        sizes: Sequence[int],
        present: Sequence[Mapping[int, int]],
        least: Sequence[int],
        kinds: Sequence[int] | None = None,
    ) -> list[dict[int, int]] | None:
        """Workers by node index for every job; None if some job finds less than its least.

        Large jobs first. Who keeps its size stays if no larger job took its nodes. Others take the node that holds
        fewest workers of such jobs, then the tightest; beyond one node, as few nodes as possible, which no other
        spanning job uses if that can be. A job that finds less room than its size takes less.

        Args:
            sizes: workers of each job.
            present: where its workers are, by node index.
            least: the fewest workers of each job.
            kinds: the kind of node that each job is to have; 0 for all by default.
        """
        wanted = [0] * len(sizes) if kinds is None else list(kinds)
        stays = [
            bool(here) and sum(here.values()) == size and all(self._kinds[node] == kind for node in here)
            for here, size, kind in zip(present, sizes, wanted, strict=True)
        ]
        reserved = np.zeros_like(self._slots)
        for here, stay in zip(present, stays, strict=True):
            for node, workers in here.items() if stay else ():
                reserved[node] += workers
        # Who stays comes first among equals, spanning jobs before those within a node.
        order = sorted(range(len(sizes)), key=lambda j: (-sizes[j], not stays[j], j))
        places: list[dict[int, int]] = [{} for _ in sizes]
        for j in order:
            if stays[j]:
                for node, workers in present[j].items():
                    reserved[node] -= workers
                if all(self._free[node] >= workers for node, workers in present[j].items()):
                    places[j] = dict(present[j])
                    self._take(places[j])
                    continue
            places[j] = self._find(sizes[j], reserved, self._kinds == wanted[j])
            if sum(places[j].values()) < least[j]:
                return None
            self._take(places[j])
        return places

    def grown(self, place: Mapping[int, int], more: int) -> dict[int, int] | None:
        """The same place with more workers on its own nodes, else on another one; None if nothing is free."""
        result = dict(place)
        own = [node for node in place if self._free[node] >= more]
        if own:
            result[own[0]] += more
            return result
        alike = self._kinds == self._kinds[next(iter(place))] if place else np.ones_like(self._kinds, dtype=np.bool_)
        roomy = [int(node) for node in np.flatnonzero((self._free >= more) & alike)]
        free = [node for node in roomy if node not in self._spanned] or roomy
        if not free:
            return None
        result[min(free, key=lambda node: int(self._free[node]))] = more
        return result

    def replace(self, before: Mapping[int, int], after: Mapping[int, int]) -> None:
        """Put one job elsewhere."""
        for node, workers in before.items():
            self._free[node] += workers
            if len(before) > 1:
                self._spanned.discard(node)
        self._take(after)

    def _take(self, place: Mapping[int, int]) -> None:
        for node, workers in place.items():
            self._free[node] -= workers
        if len(place) > 1:
            self._spanned.update(place)

    def _find(self, size: int, reserved: NDArray[np.int64], alike: NDArray[np.bool_]) -> dict[int, int]:
        fits = np.flatnonzero((self._free >= size) & alike)
        if len(fits):
            crowd = [(max(0, int(reserved[i]) - int(self._free[i]) + size), int(self._free[i]), int(i)) for i in fits]
            return {min(crowd)[2]: size}
        place: dict[int, int] = {}
        missing = size
        nodes = [
            (int(i) in self._spanned, -min(int(self._free[i]), missing), int(reserved[i]), int(i))
            for i in np.flatnonzero((self._free > 0) & alike)
        ]
        for _, _, _, i in sorted(nodes):
            more = min(missing, int(self._free[i]))
            place[i] = more
            missing -= more
            if not missing:
                break
        return place


def use_idle(
    running: Sequence[JobView],
    settler: Settler,
    places: list[dict[int, int]],
    *,
    most_nodes: int,
    horizon_s: float = 60.0,
) -> None:
    """Give slots that are left to jobs that they speed up by more than the change costs within the horizon.

    Changes ``places``.
    """
    for i, view in enumerate(running):
        limit = growth_limit(view)
        gain = 1.0 + view.resize_cost_s / horizon_s + 1e-9
        while view.held_at is None and places[i] and sum(places[i].values()) < limit:
            more = settler.grown(places[i], 1)
            if more is None or len(more) > most_nodes:
                break
            before, after = speeds_of(view, (shape_of(places[i]), shape_of(more)))
            if not after > gain * before:
                break
            settler.replace(places[i], more)
            places[i] = more


def restart_factor(view: JobView, now_s: float, least: float) -> float:
    """Pollux's penalty: (age - d x restarts) / (age + d), with d = ``JobView.resize_cost_s``; not below ``least``.

    Source: Qiao et al., OSDI 2021, section 4.2.1; Sia uses it too.
    """
    age_s, cost_s = max(now_s - view.submitted_s, 0.0), view.resize_cost_s
    if age_s + cost_s <= 0:
        return 1.0
    return max((age_s - cost_s * view.restarts) / (age_s + cost_s), least)


def shape_of(place: Mapping[int, int]) -> tuple[int, int]:
    """(nodes, workers) of a place."""
    return len(place), sum(place.values())


def growth_limit(view: JobView) -> int:
    """The most workers the job may have now, as far as it knows itself."""
    limit = view.useful_workers
    return limit if view.growth_limit is None else min(limit, view.growth_limit)


def present_place(view: JobView, index: Callable[[str], int | None]) -> dict[int, int]:
    """The job's workers by node index; empty if it has none, or one is on a node that is gone or draining."""
    place: dict[int, int] = {}
    for node_id, workers in view.allocation.items():
        at = index(node_id)
        if at is None:
            return {}
        place[at] = workers
    return place


def alike(jobs: Sequence[JobView]) -> bool:
    """Whether the workers of all jobs are interchangeable: one bundle, one label selector."""
    return len({(tuple(sorted(v.bundle.items())), tuple(sorted(v.selector.items()))) for v in jobs}) <= 1
