"""SHELL: Ray's view of its nodes, and (pure) the resources that elastic jobs may use."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Private, but there is no public call for what is available on each single node, nor for draining nodes; Ray
# Train's own controllers use the same. Nothing else in the tree imports it.
import ray._private.state as _ray_state
from ray.util.placement_group import placement_group_table

from placement.cluster.cluster import TOLERANCE, Cluster, Node, Resources, schedulable

_STATE: Any = _ray_state.state

_HEAD = "node:__internal_head__"
_SHARE_OF_HEAD = 0.0001  # Ray's smallest amount; the head has 1

GROUP_PREFIX = "elastic_ray"
"""Elastic jobs' placement groups are named ``elastic_ray:<job>:<worker id>``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RawNode:
    """Living node, as described by Ray."""

    node_id: str  # hex id
    total: Resources
    available: Resources  # what is free, a few hundred milliseconds old
    reserved: Mapping[str, Resources]  # what fulfilled placement groups of elastic jobs hold, per job
    draining: bool  # whether it is about to go
    goes_s: float | None = None  # when, if it drains and that was said [s since the epoch]
    labels: Mapping[str, str]


def group_name(job: str, worker: str) -> str:
    """Return the name of one worker's placement group; ``job_of`` recovers the job from it."""
    return f"{GROUP_PREFIX}:{job}:{worker}"


def job_of(group: str) -> str | None:
    """Return the job that a placement group with this name belongs to; None if it belongs to no elastic job."""
    parts = group.split(":")
    return ":".join(parts[1:-1]) if parts[0] == GROUP_PREFIX and len(parts) > 2 else None


def read_nodes() -> tuple[RawNode, ...]:
    """Return Ray's current nodes. Blocks for some milliseconds: call it from a thread, not from an event loop."""
    available = _STATE.available_resources_per_node()
    draining = _STATE.get_draining_nodes() or {}
    reserved = _reserved()
    return tuple(
        RawNode(
            node_id=node["NodeID"],
            total=schedulable(node["Resources"]),
            available=schedulable(available.get(node["NodeID"], node["Resources"])),
            reserved=reserved.get(node["NodeID"], {}),
            draining=node["NodeID"] in draining,
            goes_s=draining.get(node["NodeID"], 0) / 1000 or None,  # Ray says 0 ms where nobody has said
            labels=dict(node.get("Labels") or {}),
        )
        for node in _STATE.node_table()
        # A node whose report is missing for a moment is not gone; the median of `usable` bridges it.
        if node["Alive"]
    )


def read_available() -> dict[str, dict[str, float]]:
    """Return the resources that Ray's scheduler reports as free, keyed by node id. Blocks for some milliseconds."""
    return {node_id: dict(amounts) for node_id, amounts in _STATE.available_resources_per_node().items()}


def is_dead(actor: str) -> bool:
    """True if Ray knows that this actor (hex id) never runs again; False if unknown now. Blocks for a moment."""
    try:
        return bool(_STATE.actor_table(actor).get("State") == "DEAD")
    except ValueError:  # no id of an actor
        return False


def on_head() -> dict[str, Any]:
    """Return actor options that keep an actor on the head node; empty if Ray does not reveal the head node.

    Node affinity does not work: Ray may place an actor without resources on any node. A node that has just joined does
    not know the head yet, treats a soft affinity to it as an affinity to a lost node, and keeps the actor (measured
    with Ray 2.60: most such actors within a second of a node's arrival). The options therefore request a resource that
    only the head has, even after a restart.
    """
    has_head = any(_HEAD in node["Resources"] for node in _STATE.node_table() if node["Alive"])
    return {"resources": {_HEAD: _SHARE_OF_HEAD}} if has_head else {}


def usable(history: Sequence[Sequence[RawNode]], ours: Collection[str]) -> Cluster:
    """Return the cluster's nodes with the resources that elastic jobs may use.

    free = total - used by others, with used by others = max(0, total - available - reserved by our jobs).

    Ray's view of available resources lags behind placement groups that come and go, in both directions. The median of
    the latest snapshots is therefore used, so that use by others counts only once it has lasted for a while.
    """
    earlier = [{node.node_id: node for node in snapshot} for snapshot in history]
    nodes = []
    for node in history[-1] if history else ():
        seen = [snapshot[node.node_id] for snapshot in earlier if node.node_id in snapshot]
        free = {}
        for name, total in node.total.items():
            others = statistics.median_high([_used_by_others(past, name, ours) for past in seen])
            free[name] = max(0.0, total - others) if others > TOLERANCE else total
        nodes.append(
            Node(
                node_id=node.node_id,
                total=node.total,
                free=free,
                draining=node.draining,
                goes_s=node.goes_s,
                labels=node.labels,
            )
        )
    return Cluster(nodes=tuple(nodes))


def _used_by_others(node: RawNode, name: str, ours: Collection[str]) -> float:
    total = node.total.get(name, 0.0)
    held = sum(bundle.get(name, 0.0) for job, bundle in node.reserved.items() if job in ours)
    # Rounded to Ray's own precision, so that noise of floats is no news.
    return round(max(0.0, total - node.available.get(name, 0.0) - held), 4)


def _reserved() -> dict[str, dict[str, dict[str, float]]]:
    """Return the resources held by fulfilled groups of elastic jobs: ``{node id: {job: resources}}``."""
    reserved: dict[str, dict[str, dict[str, float]]] = {}
    for group in placement_group_table().values():
        job = job_of(str(group["name"]))
        if group["state"] != "CREATED" or job is None:
            continue
        for index, bundle in group["bundles"].items():
            node_id = group["bundles_to_node_id"].get(index)
            held = reserved.setdefault(node_id, {}).setdefault(job, {})
            for name, amount in bundle.items():
                held[name] = held.get(name, 0.0) + amount
    return reserved
