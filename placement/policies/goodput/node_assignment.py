"""From sizes to nodes for equal workers: whole nodes first, and who keeps its size keeps its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

WorkersByIndex = Mapping[int, int]
"""Workers by node index."""


def assign_nodes(
    slots: NDArray[np.int64], sizes: Sequence[int], present: Sequence[WorkersByIndex]
) -> list[dict[int, int]]:
    """Where each job's workers go.

    A job that keeps its size stays; one that shrinks keeps its fullest nodes. The others are placed largest first:
    within a node on the tightest one that takes the whole job (its own, if it can), beyond that on whole nodes, its
    own first. Where scattered room would split a job over more nodes than its size needs, smaller jobs that stand in
    the way are moved, of which there are the fewer the more powers of two and whole nodes the sizes are.

    Args:
        slots: workers that each node can hold.
        sizes: workers of each job; their sum is at most that of the slots.
        present: where each job's workers are now; empty if it has none.

    Returns:
        Workers by node index, one a job; all workers are placed.
    """
    board = _Board(slots)
    waiting: list[int] = []
    for j, (size, here) in enumerate(zip(sizes, present, strict=True)):
        have = sum(here.values())
        if 0 < size <= have and all(board.free[i] >= workers for i, workers in here.items()):
            board.put(j, _part(here, size))
        elif size:
            waiting.append(j)
    queue = sorted(waiting, key=lambda j: (-sizes[j], j))
    while queue:
        j = queue.pop(0)
        place, moved = board.find(j, sizes[j], present[j], sizes)
        for other in moved:
            board.lift(other)
        if moved:
            queue = sorted([*queue, *moved], key=lambda k: (-sizes[k], k))
        board.put(j, place)
    return [board.places.get(j, {}) for j in range(len(sizes))]


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


class _Board:
    """Free slots per node while jobs are seated."""

    def __init__(self, slots: NDArray[np.int64]) -> None:
        self.slots = slots
        self.free = slots.copy()
        self.node = int(slots.max(initial=1))
        self.places: dict[int, dict[int, int]] = {}
        self._here: dict[int, set[int]] = {}

    def put(self, j: int, place: dict[int, int]) -> None:
        """Put a job onto nodes."""
        self.places[j] = place
        for i, workers in place.items():
            self.free[i] -= workers
            self._here.setdefault(i, set()).add(j)

    def lift(self, j: int) -> None:
        """Take a job from its nodes."""
        for i, workers in self.places.pop(j).items():
            self.free[i] += workers
            self._here[i].discard(j)

    def find(self, j: int, size: int, here: WorkersByIndex, sizes: Sequence[int]) -> tuple[dict[int, int], list[int]]:
        """A place, and the jobs that have to be moved for it."""
        place: dict[int, int] = {}
        moved: list[int] = []
        taken = self.free.copy()
        missing = size
        while missing > 0:
            chunk = min(missing, self.node)
            i = self._tightest(taken, chunk, here)
            if i is None:
                i, away = self._clear(taken, chunk, sizes, moved)
                if i is None:
                    i = int(np.argmax(taken))
                    chunk = min(chunk, int(taken[i]))
                else:
                    moved += away
                    for other in away:
                        for node, workers in self.places[other].items():
                            taken[node] += workers
            assert chunk > 0, f"job {j} finds no room for {missing} of {size} workers"
            place[i] = place.get(i, 0) + chunk
            taken[i] -= chunk
            missing -= chunk
        return place, moved

    def _tightest(self, taken: NDArray[np.int64], chunk: int, here: WorkersByIndex) -> int | None:
        """Its own node that takes the chunk whole, else the tightest."""
        own = [i for i in here if taken[i] >= chunk]
        if own:
            return min(own, key=lambda i: (-here[i], int(taken[i]), i))
        enough = np.flatnonzero(taken >= chunk)
        return int(enough[np.argmin(taken[enough])]) if len(enough) else None

    def _clear(
        self, taken: NDArray[np.int64], chunk: int, sizes: Sequence[int], moved: Sequence[int]
    ) -> tuple[int | None, list[int]]:
        """The node that takes the chunk whole once the fewest workers of jobs at most half as large left it."""
        best: tuple[int, int, list[int]] | None = None
        for i in np.argsort(-taken, kind="stable")[:8].tolist():
            if self.slots[i] < chunk:
                continue
            room, away, cost = int(taken[i]), [], 0
            small = [k for k in self._here.get(i, ()) if 2 * sizes[k] <= chunk and k not in moved]
            for k in sorted(small, key=lambda k: (sizes[k], k)):
                if room >= chunk:
                    break
                room += self.places[k][i]
                away.append(k)
                cost += sizes[k]
            if room >= chunk and (best is None or cost < best[0]):
                best = cost, i, away
        return (None, []) if best is None else (best[1], best[2])
