"""Nodes of a cluster, and allocations: each job's number of workers on each node."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from placement.errors import check_once

Resources: TypeAlias = Mapping[str, float]
"""Amounts by resource name, in Ray's units (``CPU`` and ``GPU`` in devices, ``memory`` in bytes)."""

Allocation: TypeAlias = Mapping[str, Mapping[str, int]]
"""``{job: {node id: workers}}``; nodes without workers and jobs without nodes are left out.

A unit that no node has room for spans nodes. It has a place of its own, such as ``n1*4+n2*2``, with the number of its
processes on each node (:func:`parts`).
"""

GPU_TYPE_LABEL = "ray.io/accelerator-type"
"""Node label that names the type of the node's GPUs (Ray's own)."""

MARKET_LABEL = "ray.io/market-type"
"""Node label that says whether the node may be taken away: ``spot`` or ``on-demand`` (Ray's own)."""

DOMAIN_LABEL = "elastic-ray.io/domain"
"""Node label of ours that names the part of the network in which the node is near others, such as a rack or zone."""

SPOT = "spot"

TOLERANCE = 1e-6
"""Ray counts resources in ten-thousandths, so that sums of fractions may be off by less than this."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Node in the cluster, with its resources and labels.

    Attributes:
        node_id: Ray's hex node id.
        total: All resources of the node.
        free: Resources available to all elastic jobs together, including those that elastic jobs already hold:
            ``total`` minus the resources held by other users of the cluster.
        draining: True if the node will go away soon. It then gets no new workers, and its workers are moved.
        goes_s: Time at which a draining node goes [s since the epoch]; None if nobody has said.
        labels: Ray's node labels (GPU type, market, zone...).

    Examples:
        >>> from placement import Node
        >>> node = Node(node_id="n1", total={"GPU": 4.0}, free={"GPU": 3.0})
        >>> node.total["GPU"] - node.free["GPU"]
        1.0
    """

    node_id: str
    total: Resources
    free: Resources
    draining: bool = False
    goes_s: float | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.node_id:
            raise ValueError("node_id must be a non-empty string, but got ''")
        for field in ("total", "free"):
            for name, amount in getattr(self, field).items():
                if not amount >= 0:
                    raise ValueError(f"{field}[{name!r}] of node {self.node_id} must be 0 or more, but got {amount}")

    @property
    def gpu_type(self) -> str:
        """Type of the node's GPUs; empty if the node has no label for it."""
        return self.labels.get(GPU_TYPE_LABEL, "")

    @property
    def domain(self) -> str:
        """Network domain of the node (nodes near each other share one); empty if the node has no label for it."""
        return self.labels.get(DOMAIN_LABEL, "")

    @property
    def spot(self) -> bool:
        """True if the cloud may reclaim the node (a spot node). A node without a market label counts as on-demand."""
        return self.labels.get(MARKET_LABEL) == SPOT

    def slots(self, bundle: Resources) -> int:
        """Return the number of workers with this resource bundle that the node could hold if no elastic job ran."""
        return slots(self.free, bundle)

    def matches(self, label_selector: Mapping[str, str]) -> bool:
        """True if this node satisfies every condition of the selector (``placement.cluster.cluster``)."""
        return matches(self.labels, label_selector)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Cluster of nodes, sorted by id.

    Examples:
        >>> from placement import Cluster, Node
        >>> node = Node(node_id="n1", total={"GPU": 4.0}, free={"GPU": 3.0})
        >>> Cluster(nodes=(node,)).nodes[0].free["GPU"]
        3.0
    """

    nodes: tuple[Node, ...] = ()

    def __post_init__(self) -> None:
        check_once("node_id", [node.node_id for node in self.nodes], ValueError)
        object.__setattr__(self, "nodes", tuple(sorted(self.nodes, key=lambda node: node.node_id)))

    def draining(self, node_ids: Collection[str]) -> Cluster:
        """Return a copy of the cluster with these nodes marked as draining.

        Draining nodes get no new workers, and their workers are moved.
        """
        if not node_ids:
            return self
        nodes = (dataclasses.replace(n, draining=True) if n.node_id in node_ids else n for n in self.nodes)
        return Cluster(nodes=tuple(nodes))

    def by_id(self) -> dict[str, Node]:
        """Return the nodes, keyed by id."""
        return {node.node_id: node for node in self.nodes}


class AllocationError(ValueError):
    """Error raised if an allocation violates a rule.

    Attributes:
        rule: Short name of the rule: ``known job``, ``known node``, ``draining``, ``whole number``,
            ``minimum``, ``maximum``, ``nodes``, ``capacity``, ``quota`` or ``one multi-node job per node``.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule, self.message = rule, message

    def __reduce__(self) -> tuple[type[AllocationError], tuple[str, str]]:
        return type(self), (self.rule, self.message)


_PART = re.compile(r"(.+?)\*(\d+)(?:\+|$)")


def parts(place: str) -> dict[str, int]:
    """Return the number of a worker's processes on each node of its place; a plain node id gives ``{id: 1}``.

    Examples:
        >>> parts("n1*4+n2*2")
        {'n1': 4, 'n2': 2}
    """
    pairs = _PART.findall(place) if "*" in place else []
    if len(pairs) < 2 or "+".join(f"{node}*{count}" for node, count in pairs) != place:
        return {place: 1}  # a node, whose name may hold a plus
    return {node: int(count) for node, count in pairs}


def is_split(place: str) -> bool:
    """True if this place spans several nodes, as in ``n1*4+n2*2``."""
    return len(parts(place)) > 1


def by_node(places: Mapping[str, float]) -> dict[str, float]:
    """Return the number of workers on each node, keyed by node id; a worker on several nodes counts partially on each.

    ``places`` are workers keyed by place: a node id, or a string such as ``n1*4+n2*2`` (six processes on two nodes).
    """
    found: dict[str, float] = {}
    for place, workers in places.items():
        here = parts(place)
        for node_id, count in here.items():
            found[node_id] = found.get(node_id, 0.0) + workers * count / sum(here.values())
    return found


def slots(amounts: Resources, bundle: Resources) -> int:
    """Return how many bundles fit into the amounts; 10**9 for an empty bundle, which always fits."""
    fits = [int(amounts.get(name, 0.0) / need + TOLERANCE) for name, need in bundle.items() if need > 0]
    return min(fits, default=10**9)


def schedulable(amounts: Mapping[str, Any]) -> dict[str, float]:
    """Return Ray's amounts without its internal entries (shadow resources of groups, one resource per node address)."""
    return {
        name: float(amount)
        for name, amount in sorted(amounts.items())
        if "_group_" not in name and not name.startswith(("node:", "bundle"))
    }


def add_amounts(totals: dict[str, float], bundle: Resources, workers: float) -> None:
    """Add the resources of this many workers, one ``bundle`` each, to the totals; a negative number subtracts."""
    for name, need in bundle.items():
        totals[name] = totals.get(name, 0.0) + workers * need


def check(allocation: Allocation, bundles: Mapping[str, Resources], cluster: Cluster) -> None:
    """Raise AllocationError if the cluster cannot hold an allocation; the message names rule and job or node."""
    nodes = cluster.by_id()
    used: dict[str, dict[str, float]] = {}
    for job, placed in sorted(allocation.items()):
        if job not in bundles:
            raise AllocationError("known job", f"job {job!r} is not one of {sorted(bundles)}")
        for place, workers in placed.items():
            if workers < 1:
                raise AllocationError("whole number", f"job {job!r} has {workers} workers on node {place!r}")
        for node_id, share in by_node(placed).items():
            if node_id not in nodes:
                raise AllocationError("known node", f"job {job!r} is placed on node {node_id!r}, which does not exist")
            if nodes[node_id].draining:
                raise AllocationError("draining", f"job {job!r} is placed on node {node_id!r}, which is draining")
            totals = used.setdefault(node_id, {})
            add_amounts(totals, bundles[job], share)
    for node_id, totals in sorted(used.items()):
        for name, amount in sorted(totals.items()):
            free = nodes[node_id].free.get(name, 0.0)
            if amount > free + TOLERANCE * max(1.0, free):
                raise AllocationError("capacity", f"node {node_id!r} has {free:g} {name} to share, not {amount:g}")


def used_on_nodes(allocation: Allocation, bundles: Mapping[str, Resources]) -> dict[str, dict[str, float]]:
    """Return the resources that these workers use, keyed by node id; ``bundles`` gives one worker's, by job."""
    used: dict[str, dict[str, float]] = {}
    for job, placed in allocation.items():
        for node_id, workers in by_node(placed).items():
            add_amounts(used.setdefault(node_id, {}), bundles[job], workers)
    return used


def without(cluster: Cluster, allocation: Allocation, bundles: Mapping[str, Resources]) -> Cluster:
    """Return the cluster minus the resources used by an allocation's workers.

    ``bundles`` gives the resources of one worker, keyed by job.
    """
    used = used_on_nodes(allocation, bundles)
    return Cluster(
        nodes=tuple(
            dataclasses.replace(
                node,
                free={name: max(amount - used[node.node_id].get(name, 0.0), 0.0) for name, amount in node.free.items()},
            )
            if node.node_id in used
            else node
            for node in cluster.nodes
        )
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change in one job's workers from one allocation to the next; both are workers keyed by node id."""

    job: str
    before: Mapping[str, int]
    after: Mapping[str, int]


def diff(before: Allocation, after: Allocation) -> tuple[Change, ...]:
    """Return a change for each job whose workers differ between two allocations, shrinking jobs first, then by name."""
    changes = [
        Change(job=job, before=dict(before.get(job, {})), after=dict(after.get(job, {})))
        for job in sorted({*before, *after})
        if dict(before.get(job, {})) != dict(after.get(job, {}))
    ]
    return tuple(sorted(changes, key=lambda change: sum(change.after.values()) >= sum(change.before.values())))


_VALUE = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"  # as ray._private.label_utils has it
_CONDITION = re.compile(rf"(!?)(?:in\(({_VALUE}(?:, ?{_VALUE})*)\)|({_VALUE})|)")


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """True if a node with these labels satisfies a valid selector; ``!T4`` needs no label, as in Ray."""
    for label, condition in selector.items():
        negated, values = _parsed(condition)
        if (labels.get(label) in values) == negated:
            return False
    return True


def check_selector(selector: Mapping[Any, Any], what: str) -> None:
    """Raise an error for a selector that Ray would not accept.

    Args:
        what: Name of the selector in the error message, such as ``ScalingConfig(label_selector)``.
    """
    for label, condition in selector.items():
        if not isinstance(label, str) or not isinstance(condition, str):
            raise TypeError(f"{what} must map text to text, but got {dict(selector)!r}")
        if not label:
            raise ValueError(f"{what} must name labels, but got '' for {condition!r}")
        if condition == "!" or _CONDITION.fullmatch(condition) is None:
            raise ValueError(
                f"{what} must hold 'value', '!value', 'in(a,b)' or '!in(a,b)', each value of at most 63 letters, "
                f"digits and _.- that begins and ends with a letter or digit, but got {condition!r} for {label!r}"
            )


def satisfying(selector: Mapping[str, str]) -> dict[str, str]:
    """Return labels for an example node that satisfies the selector."""
    parsed = {label: _parsed(condition) for label, condition in selector.items()}
    return {label: min(values) for label, (negated, values) in parsed.items() if not negated}


@functools.lru_cache(maxsize=4096)
def _parsed(condition: str) -> tuple[bool, frozenset[str]]:
    """Return whether the condition is negated, and its values."""
    found = _CONDITION.fullmatch(condition)
    assert found is not None, f"{condition!r} was not checked"
    bang, several, single = found.groups()
    return bool(bang), frozenset(re.split(", ?", several)) if several else frozenset({single or ""})
