"""What is left of a cluster while a decision is being made."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement.cluster import TOLERANCE, Cluster
from placement.jobs import JobView


class Room:
    """Unused resources per node; a decision takes from it, so that no count is promised that fits nowhere.

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
        self._needs: dict[str, tuple[list[int], NDArray[np.float64]] | None] = {}
        self._matching: dict[tuple[tuple[str, str], ...], NDArray[np.bool_]] = {}

    def copy(self) -> Room:
        """The same room, to try something in."""
        twin = object.__new__(Room)
        twin.__dict__.update(self.__dict__)
        twin._free = self._free.copy()
        return twin

    def index(self, node_id: str) -> int | None:
        """Position of a node, None if it is gone or draining."""
        return self._index.get(node_id)

    def slots(self, view: JobView) -> NDArray[np.int64]:
        """How many more workers of the job fit on each node."""
        need = self._need(view)
        if need is None:
            return np.zeros(len(self._nodes), dtype=np.int64)
        columns, amounts = need
        fits = np.floor(self._free[:, columns] / amounts + TOLERANCE).min(axis=1).astype(np.int64)
        if view.label_selector:
            fits = np.where(self._matches(view), fits, 0)
        free: NDArray[np.int64] = np.maximum(fits, 0)
        return free

    def take(self, view: JobView, index: int, workers: int) -> None:
        """Use resources of one node; the caller has looked at ``slots``. Negative workers give back."""
        need = self._need(view)
        assert need is not None, f"job {view.job} has no slot to take"
        columns, amounts = need
        self._free[index, columns] -= workers * amounts

    def add(self, view: JobView, workers: int) -> bool:
        """Take ``workers`` bundles wherever they fit, tightest nodes first; all of them or nothing."""
        fits = self.slots(view)
        if int(fits.sum()) < workers:
            return False
        for index in np.argsort(np.where(fits > 0, fits, np.iinfo(np.int64).max), kind="stable"):
            if workers == 0:
                break
            here = min(workers, int(fits[index]))
            self.take(view, int(index), here)
            workers -= here
        return True

    def share(self, view: JobView) -> float:
        """Dominant share: the largest part of any resource of the whole room that one worker takes."""
        need = self._need(view)
        if need is None:
            return 1.0
        columns, amounts = need
        return float(np.max(amounts / np.maximum(self._total[columns], TOLERANCE)))

    def _need(self, view: JobView) -> tuple[list[int], NDArray[np.float64]] | None:
        """Columns and amounts of the job's bundle; None if it needs something that no node has."""
        if view.job not in self._needs:
            wanted = {name: amount for name, amount in view.bundle.items() if amount > 0}
            known = all(name in self._names for name in wanted)
            columns = [self._names.index(name) for name in wanted] if known else []
            self._needs[view.job] = (columns, np.array(list(wanted.values()), dtype=np.float64)) if known else None
        return self._needs[view.job]

    def _matches(self, view: JobView) -> NDArray[np.bool_]:
        key = tuple(sorted(view.label_selector.items()))
        if key not in self._matching:
            self._matching[key] = np.array([node.matches(view.label_selector) for node in self._nodes], dtype=np.bool_)
        return self._matching[key]
