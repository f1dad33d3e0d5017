"""Placement by worst fit: nodes with the most room first, one GPU type per job."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Cluster
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView
from placement.cluster.occupancy import worst_fit


class WorstFitPlacer:
    """Places jobs one after the other; running jobs may keep their nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self.free = FreeResources(cluster)
        types = {node.node_id: node.gpu_type for node in cluster.nodes}
        self._types = [types[node_id] for node_id in self.free.node_ids]

    def keep(self, view: JobView) -> Mapping[str, int] | None:
        """Reserve the job's current place and return it; if part of it is not free, reserve nothing and return None."""
        fits = self.free.slots(view)
        place = {self.free.index(node_id): workers for node_id, workers in view.allocation.items()}
        if any(index is None or fits[index] < workers for index, workers in place.items()):
            return None
        for index, workers in place.items():
            assert index is not None
            self.free.take(view, index, workers)
        return dict(view.allocation)

    def spread(self, view: JobView, workers: int) -> Mapping[str, int] | None:
        """Reserve room for the workers, always on the node with the most room, within the GPU type with the most room.

        If no type has enough room, reserve nothing and return None. Ties between nodes go to the first id.
        """
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
