"""Cluster strings such as ``aws:16x4`` or ``aws:6x4,rtx:3x8,dgx-ext:2x8``."""

from __future__ import annotations

import re

from placement.cluster.cluster import GPU_TYPE_LABEL, Cluster, Node
from placement.errors import InputError

_PART = re.compile(r"(?P<gpu>[A-Za-z][\w-]*):(?P<nodes>[0-9]+)x(?P<gpus>[0-9]+)")
_MOST = 10_000  # nodes, and GPUs per node: more are a slip of the keyboard that would fill the memory
_EXAMPLES = "'aws:16x4' or 'aws:6x4,rtx:3x8,dgx-ext:2x8'"


def parse_cluster(text: str) -> Cluster:
    """Return the nodes described by a cluster string: comma-separated ``<gpu type>:<nodes>x<GPUs per node>``.

    Node ids are ``<gpu type>-<three digits>``, so that nodes of a type sort by number. Raises InputError if the string
    cannot be parsed, names a type twice, or contains a zero or more than 10,000 nodes or GPUs per node.
    """
    nodes: list[Node] = []
    seen: set[str] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise InputError(f"cluster must look like {_EXAMPLES}, but got {part.strip()!r} in {text!r}")
        gpu, count, gpus = match["gpu"], _number(match["nodes"]), _number(match["gpus"])
        if gpu in seen:
            raise InputError(f"cluster must name each GPU type once, but {gpu!r} occurs twice in {text!r}")
        if count < 1 or gpus < 1:
            raise InputError(f"cluster must have 1 node and 1 GPU per node or more, but got {part.strip()!r}")
        if max(len(nodes) + count, gpus) > _MOST:
            raise InputError(f"cluster must have at most {_MOST} nodes, and GPUs per node, but got {text[:200]!r}")
        seen.add(gpu)
        amounts = {"GPU": float(gpus)}
        width = max(3, len(str(count - 1)))
        labels = {GPU_TYPE_LABEL: gpu}
        nodes += [
            Node(node_id=f"{gpu}-{i:0{width}d}", total=amounts, free=amounts, labels=labels) for i in range(count)
        ]
    return Cluster(nodes=tuple(nodes))


def _number(digits: str) -> int:
    """Return the number that digits show; numbers above the largest allowed one need not be exact."""
    return int(digits.lstrip("0")[:9] or 0)


def gpu_types(cluster: Cluster) -> tuple[str, ...]:
    """Return the distinct GPU types in a cluster, sorted by name."""
    return tuple(sorted({node.gpu_type for node in cluster.nodes}))
