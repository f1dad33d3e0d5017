"""Node types that may be requested, with their resources, prices and lifetimes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from placement.checks import check_kind, check_number, check_whole, plain_numbers
from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, SPOT, Node, Resources, matches, slots
from placement.cluster.jobs import JobView
from placement.errors import InputError, check_once

GROUP_LABEL = "ray.io/node-group"
"""Node label that names the node type (Ray's own: the key in ``available_node_types``, or KubeRay's group)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Type of node that the autoscaler can request.

    Attributes:
        name: Name of the type, as in ``available_node_types`` of a cluster file.
        resources: All resources of one node, in Ray's units.
        labels: Labels on every node of this type. ``ray.io/market-type`` marks a spot node; ``ray.io/accelerator-type``
            is the type of its GPUs.
        usd_per_h: Price of one node [USD/h].
        min_nodes: Number of nodes that are always kept.
        max_nodes: Maximum number of nodes of this type.
        startup_s: Time from the request until a node can run a worker [s].
        lasts_h: Mean time until the cloud reclaims a node of this type [h]; infinity if that never happens.

    Examples:
        >>> from placement import NodeType
        >>> NodeType(name="t4", resources={"GPU": 4.0}, usd_per_h=2.0, max_nodes=8).startup_s
        180.0
    """

    name: str
    resources: Resources
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    usd_per_h: float = 0.0
    min_nodes: int = 0
    max_nodes: int = 1
    startup_s: float = 180.0
    lasts_h: float = math.inf

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise InputError(f"name of a node type must be a non-empty string, but got {self.name!r:.80}")
        where = f"of node type {self.name!r}"
        check_kind(f"resources {where}", self.resources, Mapping, "a mapping such as {'GPU': 4}", error=InputError)
        check_kind(f"labels {where}", self.labels, Mapping, "a mapping from text to text", error=InputError)
        for resource, amount in self.resources.items():
            check_kind(f"each resource {where}", resource, str, "text", error=InputError)
            check_number(f"resource {resource!r} {where}", amount, least=0, finite=True, error=InputError)
        for label, text in self.labels.items():
            for each in (label, text):
                check_kind(f"labels {where}", each, str, "a mapping from text to text", error=InputError)
        for field in ("min_nodes", "max_nodes"):
            check_whole(f"{field} {where}", getattr(self, field), error=InputError)
        if not any(amount > 0 for amount in self.resources.values()):
            raise InputError(f"resources {where} must name one above 0, such as {{'GPU': 4}}, but got {self.resources}")
        if self.min_nodes > self.max_nodes:
            raise InputError(
                f"min_nodes and max_nodes {where} must satisfy 0 <= min <= max, "
                f"but got {self.min_nodes} and {self.max_nodes}"
            )
        for field in ("usd_per_h", "startup_s"):
            check_number(f"{field} {where}", getattr(self, field), least=0, finite=True, error=InputError)
        check_number(f"lasts_h {where}", self.lasts_h, above=0, unit="hours", error=InputError)
        plain_numbers(self)

    @property
    def spot(self) -> bool:
        """True if the cloud may reclaim nodes of this type."""
        return self.labels.get(MARKET_LABEL) == SPOT

    @property
    def gpu_type(self) -> str:
        """Type of the node's GPUs; empty if it has none."""
        return self.labels.get(GPU_TYPE_LABEL, "")

    def node(self, node_id: str) -> Node:
        """Return an unused node of this type with this id."""
        labels = {**self.labels, GROUP_LABEL: self.name}
        return Node(node_id=node_id, total=self.resources, free=self.resources, labels=labels)

    def slots(self, view: JobView) -> int:
        """Return the number of the job's workers that fit on one node; 0 if the job's selector excludes this type."""
        return slots(self.resources, view.bundle) if matches(self.labels, view.selector) else 0

    def share(self, view: JobView, workers: float) -> float:
        """Return the fraction of one node of this type, at most 1, that these workers (or parts of a unit) use."""
        if fit := self.slots(view):
            return workers / max(fit, workers)
        needs = [(workers * need, self.resources.get(name, 0.0)) for name, need in view.bundle.items() if need > 0]
        return max(need / max(amount, need) for need, amount in needs)


def obtainable(types: Sequence[NodeType]) -> tuple[Node, ...]:
    """Return every node that could be requested, ``max_nodes`` of each type, as an unused node."""
    return tuple(each.node(f"{each.name}~{i}") for each in types for i in range(each.max_nodes))


def check_types(types: Sequence[NodeType]) -> None:
    """Raise InputError if there are no node types, or a name occurs twice."""
    check_kind("node_types", types, tuple | list, "a tuple of NodeType(...)", error=InputError)
    for each in types:
        check_kind("node_types", each, NodeType, "a tuple of NodeType(...)", error=InputError)
    if not types:
        raise InputError("node types must name one or more, but there are none: nothing could be asked for")
    check_once("node type", [each.name for each in types])


def type_of(node: Node, types: Sequence[NodeType]) -> str | None:
    """Return the name of the node's type; None if the node matches no type (usually the head node).

    Ray labels each node started by its autoscaler with the type's name. A node without that label is matched to the
    first type whose labels and resources it has.
    """
    group = node.labels.get(GROUP_LABEL)
    if group is not None:
        return group if any(each.name == group for each in types) else None
    for each in types:
        if matches(node.labels, each.labels) and all(
            node.total.get(name, 0.0) >= amount for name, amount in each.resources.items()
        ):
            return each.name
    return None
