"""For policies that place their jobs themselves: nodes with the most room first, one GPU type a job."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Cluster
from placement.cluster.free_slots import Room
from placement.cluster.jobs import JobView


class Board:
    """The cluster while jobs are put onto it."""

    def __init__(self, cluster: Cluster) -> None:
        self.room = Room(cluster)
        types = {node.node_id: node.gpu_type for node in cluster.nodes}
        self._types = [types[node_id] for node_id in self.room.node_ids]

    def keep(self, view: JobView) -> Mapping[str, int] | None:
        """Take the room of the job's present place; None, and nothing taken, if it is not all there."""
        fits = self.room.slots(view)
        for node_id, workers in view.allocation.items():
            index = self.room.index(node_id)
            if index is None or fits[index] < workers:
                return None
        for node_id, workers in view.allocation.items():
            index = self.room.index(node_id)
            assert index is not None
            self.room.take(view, index, workers)
        return dict(view.allocation)

    def spread(self, view: JobView, workers: int) -> Mapping[str, int] | None:
        """Take workers from the node with the most room until all are served, within the roomiest GPU type.

        None, and nothing taken, if no type has so much room. Of equal nodes the first by id is taken.
        """
        fits = self.room.slots(view)
        sums = {gpu: int(fits[self._of(gpu)].sum()) for gpu in dict.fromkeys(self._types)}
        roomiest = max(sums, key=lambda gpu: sums[gpu], default="")
        if not sums or sums[roomiest] < workers:
            return None
        nodes: dict[str, int] = {}
        while workers > 0:
            here = np.where(self._of(roomiest), self.room.slots(view), 0)
            index = int(np.argmax(here))
            more = min(workers, int(here[index]))
            self.room.take(view, index, more)
            nodes[self.room.node_ids[index]] = nodes.get(self.room.node_ids[index], 0) + more
            workers -= more
        return nodes

    def _of(self, gpu: str) -> NDArray[np.bool_]:
        return np.array([each == gpu for each in self._types], dtype=np.bool_)
