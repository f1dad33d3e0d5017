"""Assignment of nodes to jobs with interchangeable workers: whole nodes first, and unchanged jobs stay in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.packing import FreeSlots, Occupancy, best_fit, worst_fit

WorkersByIndex = Mapping[int, int]
"""Workers by node index."""


def assign_nodes(
    slots: NDArray[np.int64], sizes: Sequence[int], present: Sequence[WorkersByIndex]
) -> list[dict[int, int]]:
    """Assign nodes to each job's workers, moving as few jobs as possible.

    A job that keeps its size stays in place, and a job that shrinks keeps its fullest nodes. All other jobs are placed
    in order of decreasing size. A job of up to one full node goes to the tightest node that holds all of it, preferring
    its own nodes; a larger job gets whole nodes, its own first. If scattered room would split a job over more nodes
    than its size needs, smaller jobs that are in the way are moved. Such moves become rarer as more of the sizes are
    powers of two or whole nodes.

    Returns the workers of each job, keyed by node index; all workers are placed.
    """
    assignment = _Assignment(slots, sizes)
    waiting: list[int] = []
    for j, (size, here) in enumerate(zip(sizes, present, strict=True)):
        have = sum(here.values())
        if 0 < size <= have and assignment.holds(here):
            assignment.occupied.put_all(j, _part(here, size))
        elif size:
            waiting.append(j)
    queue = sorted(waiting, key=lambda j: (-sizes[j], j))
    while queue:
        j = queue.pop(0)
        place, moved = assignment.find(j, present[j])
        for other in moved:
            assignment.occupied.lift(other)
        if moved:
            queue = sorted([*queue, *moved], key=lambda k: (-sizes[k], k))
        assignment.occupied.put_all(j, place)
    return [dict(assignment.occupied.place(j)) for j in range(len(sizes))]


def grow_in_place(
    slots: NDArray[np.int64], sizes: Sequence[int], present: Sequence[WorkersByIndex]
) -> list[dict[int, int]]:
    """Assign nodes to each job's workers without moving current workers; a job grows on its own nodes first.

    Returns the workers of each job, keyed by node index: fewer than its size if there is not enough room.
    """
    free = slots.copy()
    places = [dict(here) for here in present]
    for here in present:
        for i, workers in here.items():
            free[i] -= workers
    for place, size in zip(places, sizes, strict=True):
        missing = size - sum(place.values())
        own = set(place)
        for i in sorted(np.flatnonzero(free > 0).tolist(), key=lambda i: (i not in own, -int(free[i]), i)):
            more = min(missing, int(free[i]))
            if more <= 0:
                break
            place[i] = place.get(i, 0) + more
            free[i] -= more
            missing -= more
    return places


def _part(here: WorkersByIndex, size: int) -> dict[int, int]:
    """Return the fullest nodes of a place, up to ``size`` workers, so that the job spans as few nodes as possible."""
    if size == sum(here.values()):
        return dict(here)
    part: dict[int, int] = {}
    for i, workers in sorted(here.items(), key=lambda item: (-item[1], item[0])):
        part[i] = min(workers, size)
        size -= part[i]
        if not size:
            break
    return part


class _Assignment:
    """Assignment of jobs with given sizes, one after another: whole nodes first, by best fit."""

    def __init__(self, slots: NDArray[np.int64], sizes: Sequence[int]) -> None:
        self.occupied = Occupancy(FreeSlots(slots))
        self._slots, self._sizes = slots, sizes
        self._node = int(slots.max(initial=1))

    def holds(self, place: WorkersByIndex) -> bool:
        """True if every slot of the place is still free."""
        free = self.occupied.slots(0)
        return all(free[i] >= workers for i, workers in place.items())

    def find(self, j: int, here: WorkersByIndex) -> tuple[dict[int, int], list[int]]:
        """Return a place for the job, and the jobs that must be moved to free it."""
        place: dict[int, int] = {}
        moved: list[int] = []
        free = self.occupied.slots(j)
        missing = self._sizes[j]
        while missing > 0:
            chunk = min(missing, self._node)
            i = _tightest(free, chunk, here)
            if i is None:
                i, away = self._clear(free, chunk, moved)
                moved += away
                for other in away:
                    for node, workers in self.occupied.place(other).items():
                        free[node] += workers
            if i is None:
                i = worst_fit(free)
                assert i is not None, f"job {j} finds no room for {missing} of {self._sizes[j]} workers"
                chunk = min(chunk, int(free[i]))
            place[i] = place.get(i, 0) + chunk
            free[i] -= chunk
            missing -= chunk
        return place, moved

    def _clear(self, free: NDArray[np.int64], chunk: int, moved: Sequence[int]) -> tuple[int | None, list[int]]:
        """Return a node that can hold the whole chunk, and the jobs (at most half as large) that must leave it."""
        best: tuple[int, int, list[int]] | None = None
        sizes = self._sizes
        for i in np.argsort(-free, kind="stable")[:8].tolist():
            if self._slots[i] < chunk:
                continue
            room, away, cost = int(free[i]), [], 0
            small = [k for k in self.occupied.on(i) if 2 * sizes[k] <= chunk and k not in moved]
            for k in sorted(small, key=lambda k: (sizes[k], k)):
                if room >= chunk:
                    break
                room += self.occupied.place(k)[i]
                away.append(k)
                cost += sizes[k]
            if room >= chunk and (best is None or cost < best[0]):
                best = cost, i, away
        return (None, []) if best is None else (best[1], best[2])


def _tightest(free: NDArray[np.int64], chunk: int, here: WorkersByIndex) -> int | None:
    """Return one of the job's own nodes if it holds the whole chunk, else the tightest node that does, else None."""
    own = [i for i in here if free[i] >= chunk]
    if own:
        return min(own, key=lambda i: (-here[i], int(free[i]), i))
    return best_fit(free, chunk)
