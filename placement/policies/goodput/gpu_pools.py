"""The cluster as pools of nodes, one per GPU type, and the shapes that a job may take in each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Cluster
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView, WorkerKind

Ints: TypeAlias = NDArray[np.int64]
_EVERY = 8  # sizes up to here are all tried, and all up to a whole node
_FEW_NODES = 16  # beyond so many nodes, sizes grow by a fifth each instead of by a node


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuPool:
    """The nodes of one GPU type that are not about to go.

    Attributes:
        gpu: the type, empty where nodes do not say.
        cluster: its nodes.
        node_ids: their ids, in the order of every array over nodes.
        slots: by kind of worker, how many such workers each node could hold if it were empty.
        shares: by kind of worker, dominant share of one worker: the largest part of any resource of the pool that it
            takes.
    """

    gpu: str
    cluster: Cluster
    node_ids: tuple[str, ...]
    slots: dict[WorkerKind, Ints]
    shares: dict[WorkerKind, float]


def split(cluster: Cluster, samples: Mapping[WorkerKind, JobView]) -> tuple[GpuPool, ...]:
    """Pools of the cluster in the order of their types, with the slots of these kinds of workers."""
    groups: dict[str, list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        if not node.draining:
            groups.setdefault(node.gpu_type, []).append(index)
    pools = []
    for gpu, indices in sorted(groups.items()):
        part = Cluster(nodes=tuple(cluster.nodes[i] for i in indices))
        room = FreeResources(part)
        slots = {kind: room.slots(view) for kind, view in samples.items()}
        shares = {kind: room.share(view) for kind, view in samples.items()}
        pools.append(GpuPool(gpu=gpu, cluster=part, node_ids=room.node_ids, slots=slots, shares=shares))
    return tuple(pools)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeGrid:
    """Sizes that jobs may have in one pool, rising.

    Attributes:
        sizes: workers.
        regular: powers of two within a node, whole nodes, and whatever some job must have: sizes that leave no
            scattered room behind. The others are for filling up.
    """

    sizes: Ints
    regular: NDArray[np.bool_]


def size_grid(node: int, total: int, most: int, extra: Iterable[int]) -> SizeGrid:
    """Sizes of interest where the largest node holds ``node`` workers and all together ``total``.

    Args:
        node: workers on the largest node.
        total: workers on all nodes.
        most: the most workers that any job can use.
        extra: sizes that must be on it: minimums, maximums, sizes that a user holds a job at.
    """
    top = min(total, most)
    wanted = tuple(sorted({size for size in extra if 1 <= size <= top}))
    return _size_grid(node, top, wanted)


@functools.lru_cache(maxsize=256)
def _size_grid(node: int, top: int, wanted: tuple[int, ...]) -> SizeGrid:
    """The grid up to ``top``; decisions ask for the same few again and again."""
    regular = set(wanted)
    size = 1
    while size <= min(node, top):
        regular.add(size)
        size *= 2
    nodes = 1
    while node and nodes * node <= top:
        regular.add(nodes * node)
        nodes += 1 if nodes < _FEW_NODES else max(1, nodes // 5)
    sizes = sorted(regular | set(range(1, min(max(_EVERY, node), top) + 1)))
    return SizeGrid(
        sizes=np.array(sizes, dtype=np.int64), regular=np.array([s in regular for s in sizes], dtype=np.bool_)
    )


def nodes_needed(slots: Ints, sizes: Ints) -> Ints:
    """The fewest nodes that hold so many workers; 0 where all together do not."""
    roomy = np.cumsum(-np.sort(-slots))
    if not len(roomy):
        return np.zeros_like(sizes)
    return np.where(sizes <= roomy[-1], np.searchsorted(roomy, sizes) + 1, 0)
