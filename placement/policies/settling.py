"""From sizes to nodes for equal workers: whole nodes first, moving as few running jobs as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


class Settler:
    """Slots of the nodes while jobs settle on them.

    Args:
        slots: workers that each node can hold.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self._slots = np.array(slots, dtype=np.int64)
        self._free = self._slots.copy()
        self._spanned: set[int] = set()

    def place(
        self, sizes: Sequence[int], present: Sequence[Mapping[int, int]], least: Sequence[int]
    ) -> list[dict[int, int]] | None:
        """Workers by node index for every job; None if some job finds less than its least.

        Large jobs first. Who keeps its size stays if no larger job took its nodes. Others take the node that holds
        fewest workers of such jobs, then the tightest; beyond one node, as few nodes as possible, which no other
        spanning job uses if that can be. A job that finds less room than its size takes less.

        Args:
            sizes: workers of each job.
            present: where its workers are, by node index.
            least: the fewest workers of each job.
        """
        stays = [bool(here) and sum(here.values()) == size for here, size in zip(present, sizes, strict=True)]
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
            places[j] = self._find(sizes[j], reserved)
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
        free = [int(node) for node in np.flatnonzero(self._free >= more) if node not in self._spanned]
        free = free or [int(node) for node in np.flatnonzero(self._free >= more)]
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

    def _find(self, size: int, reserved: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[int, int]:
        fits = np.flatnonzero(self._free >= size)
        if len(fits):
            crowd = [(max(0, int(reserved[i]) - int(self._free[i]) + size), int(self._free[i]), int(i)) for i in fits]
            return {min(crowd)[2]: size}
        place: dict[int, int] = {}
        missing = size
        nodes = [
            (i in self._spanned, -min(int(self._free[i]), missing), int(reserved[i]), int(i))
            for i in np.flatnonzero(self._free > 0)
        ]
        for _, _, _, i in sorted(nodes):
            more = min(missing, int(self._free[i]))
            place[i] = more
            missing -= more
            if not missing:
                break
        return place
