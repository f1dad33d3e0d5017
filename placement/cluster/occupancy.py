"""Occupancy of nodes while a decision places jobs: workers, free room, and the two ways to choose a node.

``best_fit`` selects the tightest node that holds all workers, so that large gaps stay whole; ``worst_fit`` selects the
roomiest, so that a job spans few nodes. Both are known from bin packing. The caller decides which jobs keep their
nodes and which come first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

_Job = TypeVar("_Job")
_JobContra = TypeVar("_JobContra", contravariant=True)
_Key = TypeVar("_Key", bound=Hashable)
_KeyCo = TypeVar("_KeyCo", bound=Hashable, covariant=True)


class Free(Protocol[_JobContra, _KeyCo]):
    """Protocol of free room on nodes: ``FreeResources`` if workers differ, else ``FreeSlots``."""

    def key(self, job: _JobContra) -> _KeyCo:
        """Return a key that identifies the job."""
        ...

    def slots(self, job: _JobContra) -> Ints:
        """Return how many more of the job's workers fit on each node; the caller may change the array."""
        ...

    def take(self, job: _JobContra, index: int, workers: int) -> None:
        """Reserve room on one node; negative workers release it."""
        ...


class FreeSlots:
    """Free slots of each node if the workers of all jobs are alike; jobs are numbers."""

    def __init__(self, slots: Sequence[int] | Ints) -> None:
        self._free = np.array(slots, dtype=np.int64)

    def key(self, job: int) -> int:
        """Return the key of a job; see ``Free``."""
        return job

    def slots(self, job: int) -> Ints:
        """Return the free slots; see ``Free``."""
        return self._free.copy()

    def take(self, job: int, index: int, workers: int) -> None:
        """Reserve slots of a node for workers of the job."""
        self._free[index] -= workers


class Occupancy(Generic[_Job, _Key]):
    """Workers of each job by node, and the room that they leave free.

    Args:
        free: Remaining room on the nodes; from now on it must only be changed through this object.
    """

    def __init__(self, free: Free[_Job, _Key]) -> None:
        self._free = free
        self._places: dict[_Key, dict[int, int]] = {}
        self._on: dict[int, set[_Key]] = {}
        self._multi_node: set[_Key] = set()

    def slots(self, job: _Job) -> Ints:
        """Return how many more of the job's workers fit on each node."""
        return self._free.slots(job)

    def place(self, job: _Job) -> Mapping[int, int]:
        """Return the job's workers by node; empty if it has none."""
        return self._places.get(self._free.key(job), {})

    def workers(self, job: _Job) -> int:
        """Return the number of the job's workers."""
        return sum(self.place(job).values())

    def put(self, job: _Job, index: int, workers: int) -> None:
        """Add workers of the job on one node. The caller must check ``slots``."""
        self._free.take(job, index, workers)
        key = self._free.key(job)
        place = self._places.setdefault(key, {})
        place[index] = place.get(index, 0) + workers
        self._on.setdefault(index, set()).add(key)
        if len(place) > 1:
            self._multi_node.add(key)

    def put_all(self, job: _Job, place: Mapping[int, int]) -> None:
        """Add workers of the job on several nodes."""
        for index, workers in place.items():
            self.put(job, index, workers)

    def lift(self, job: _Job) -> dict[int, int]:
        """Remove the job from its nodes, and return its former workers by node."""
        key = self._free.key(job)
        place = self._places.pop(key, {})
        self._multi_node.discard(key)
        for index, workers in place.items():
            self._free.take(job, index, -workers)
            self._on[index].discard(key)
        return place

    def on(self, index: int) -> frozenset[_Key]:
        """Return the keys of the jobs on a node."""
        return frozenset(self._on.get(index, ()))

    def multi_node_nodes(self, beside: _Job | None = None) -> set[int]:
        """Return the nodes that hold workers of a multi-node job other than ``beside``."""
        own = None if beside is None else self._free.key(beside)
        return {index for key in self._multi_node if key != own for index in self._places[key]}


def best_fit(fits: NDArray[np.int64], wanted: int) -> int | None:
    """Return the tightest node with room for these workers, the first of equals; None if none has room."""
    enough = fits >= wanted
    return int(np.argmin(np.where(enough, fits, np.iinfo(np.int64).max))) if enough.any() else None


def worst_fit(fits: NDArray[np.int64]) -> int | None:
    """Return the roomiest node, the first of equals; None if none has room for a worker."""
    index = int(np.argmax(fits)) if len(fits) else 0
    return index if len(fits) and fits[index] > 0 else None


def mask(indices: Mapping[int, int] | set[int], length: int) -> NDArray[np.bool_]:
    """Return a mask over `length` nodes that is True at `indices`."""
    found = np.zeros(length, dtype=np.bool_)
    found[list(indices)] = True
    return found
