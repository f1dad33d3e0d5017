"""Placement for policies that place their jobs: nodes with the most room first, one GPU type a job."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Cluster
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView
from placement.cluster.occupancy import worst_fit


class WorstFitPlacer:
    """Places jobs one after the other; jobs that run may keep their nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self.free = FreeResources(cluster)
        types = {node.node_id: node.gpu_type for node in cluster.nodes}
        self._types = [types[node_id] for node_id in self.free.node_ids]

    def keep(self, view: JobView) -> Mapping[str, int] | None:
        """Reserve the room of the job's present place; None, and nothing taken, if it is not all there."""
        fits = self.free.slots(view)
        place = {self.free.index(node_id): workers for node_id, workers in view.allocation.items()}
        if any(index is None or fits[index] < workers for index, workers in place.items()):
            return None
        for index, workers in place.items():
            assert index is not None
            self.free.take(view, index, workers)
        return dict(view.allocation)

    def spread(self, view: JobView, workers: int) -> Mapping[str, int] | None:
        """Reserve workers from the node with the most room until all are served, within the roomiest GPU type.

        None, and nothing taken, if no type has so much room. Of equal nodes the first by id is taken.
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
