"""Use of each node's slots, for the metrics and the web page (pure)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from placement.allocator.snapshot import JobState
from placement.cluster.cluster import Node, Resources, by_node


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotUse:
    """Slots of a node (GPUs, or CPUs on nodes without GPUs) in each state; they sum to all slots of the node."""

    used: float = 0.0  # held by elastic jobs
    starting: float = 0.0  # granted to them, but not used yet
    draining: float = 0.0  # unused, on a node that is about to go
    idle: float = 0.0
    other: float = 0.0  # held by others than elastic jobs


def slot_uses(
    nodes: Sequence[Node], jobs: Iterable[JobState], training: Mapping[str, int] | None = None
) -> dict[str, SlotUse]:
    """Return the use of each node's slots, keyed by node id.

    Args:
        training: Number of workers that train, keyed by job: the other workers of these jobs count as starting, in
            equal parts on all their nodes. Jobs that are left out use what they hold.
    """
    used, granted = collections.defaultdict[str, float](float), collections.defaultdict[str, float](float)
    by_id = {node.node_id: node for node in nodes}
    for job in jobs:
        holds, gets = by_node(job.view.allocation), by_node(job.target)
        all_of = {name: max(holds.get(name, 0.0), gets.get(name, 0.0)) for name in {*holds, *gets}}
        train = (training or {}).get(job.view.job)
        share = min(train / total, 1.0) if train is not None and (total := sum(all_of.values())) else 0.0
        for name in all_of.keys() & by_id.keys():
            each, whole = slots_in(job.view.bundle, by_id[name].total), all_of[name]
            begun = holds.get(name, 0.0) if train is None else whole * share
            used[name] += each * begun
            granted[name] += each * (whole - begun)
    return {node.node_id: _use(node, used[node.node_id], granted[node.node_id]) for node in nodes}


def _use(node: Node, used: float, granted: float) -> SlotUse:
    """Return the use of one node's slots, of which jobs use some and were granted others."""
    total, ours = (slots_in(amounts, node.total) for amounts in (node.total, node.free))
    used = min(used, total)
    starting = min(granted, total - used)
    free = max(min(ours, total) - used - starting, 0.0)
    other = total - used - starting - free
    if node.draining:
        return SlotUse(used=used, starting=starting, draining=free, other=other)
    return SlotUse(used=used, starting=starting, idle=free, other=other)


def slots_in(amounts: Resources, total: Resources) -> float:
    """Return the number of GPUs in these amounts, or of CPUs if the node (with ``total`` resources) has no GPU."""
    return amounts.get("GPU" if total.get("GPU") else "CPU", 0.0)
