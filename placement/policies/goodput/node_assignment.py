"""Node assignment for equal workers: whole nodes first, and a job that keeps its size keeps its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.occupancy import FreeSlots, Occupancy, best_fit, worst_fit

WorkersByIndex = Mapping[int, int]
"""Workers by node index."""


def assign_nodes(
    slots: NDArray[np.int64], sizes: Sequence[int], present: Sequence[WorkersByIndex]
) -> list[dict[int, int]]:
    """Assign nodes to each job's workers.

    A job that keeps its size stays; one that shrinks keeps its fullest nodes. The others are placed largest first:
    within a node on the tightest one that takes the whole job (its own, if it can), beyond that on whole nodes, its
    own first. Where scattered room would split a job over more nodes than its size needs, smaller jobs that stand in
    the way are moved, of which there are the fewer the more powers of two and whole nodes the sizes are.

    Args:
        slots: workers that each node can hold.
        sizes: workers of each job; their sum is at most that of the slots.
        present: where each job's workers are now; empty if it has none.

    Returns workers by node index, one a job; all workers are placed.
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
    """Assign nodes to each job's workers while all present ones stay; growth goes to a job's own nodes first.

    Args:
        slots: workers that each node can hold.
        sizes: workers of each job; one that is to have fewer than it has keeps what it has.
        present: where each job's workers are now; they fit together.

    Returns workers by node index, one a job; fewer than its size where no room is left.
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
    """The fullest nodes of a place, up to so many workers; one node that holds them all is best."""
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
    """Places for jobs of given sizes, one after the other; whole nodes first, by best fit."""

    def __init__(self, slots: NDArray[np.int64], sizes: Sequence[int]) -> None:
        self.occupied = Occupancy(FreeSlots(slots))
        self._slots = slots
        self._sizes = sizes
        self._node = int(slots.max(initial=1))

    def holds(self, place: WorkersByIndex) -> bool:
        """True if all of a place is still free."""
        free = self.occupied.slots(0)
        return all(free[i] >= workers for i, workers in place.items())

    def find(self, j: int, here: WorkersByIndex) -> tuple[dict[int, int], list[int]]:
        """A place, and the jobs that have to be moved for it."""
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
        """The node that takes the chunk whole once the fewest workers of jobs at most half as large left it."""
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
    """Return the job's own node that takes the whole chunk, else the tightest one."""
    own = [i for i in here if free[i] >= chunk]
    if own:
        return min(own, key=lambda i: (-here[i], int(free[i]), i))
    return best_fit(free, chunk)
