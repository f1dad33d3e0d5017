"""Free resources of a cluster while a decision is being made."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import TOLERANCE, Cluster
from placement.cluster.jobs import JobView, WorkerKind, worker_kind

_FEW = 16  # changed nodes up to which they are looked at one by one


@dataclasses.dataclass(slots=True)
class _KindSlots:
    """Slots for workers of one bundle and label selector. Thousands of jobs share a few kinds."""

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
        """Return the key of a job; see ``occupancy.Free``."""
        return view.job

    def index(self, node_id: str) -> int | None:
        """Return the position of a node; None if it is gone or draining."""
        return self._index.get(node_id)

    def slots(self, view: JobView) -> NDArray[np.int64]:
        """Return how many more workers of the job fit on each node."""
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

    def take(self, view: JobView, index: int, workers: int) -> None:
        """Reserve resources on one node. The caller must check ``slots``; negative workers release resources."""
        needs = self._kind(view).needs
        assert needs is not None, f"job {view.job} has no slot to take"
        for column, amount in needs:
            self._free[index, column] -= workers * amount
        self._changed.append(index)

    def add(self, view: JobView, workers: int) -> bool:
        """Reserve ``workers`` bundles, on the tightest nodes first; reserve all or none, and return True if all fit."""
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
        """Return the dominant share of one worker: its largest fraction of any resource of the cluster."""
        return self._kind(view).share

    def _kind(self, view: JobView) -> _KindSlots:
        key = worker_kind(view)
        if key not in self._kinds:
            self._kinds[key] = self._new_kind(view)
        return self._kinds[key]

    def _new_kind(self, view: JobView) -> _KindSlots:
        """Return the job's kind of worker, with slots counted on all nodes.

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
