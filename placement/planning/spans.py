"""Placement of units that are too large for any single node and therefore span several (pure).

A policy sees each possible place for such a unit as one virtual node, whose resources are deducted from its member
nodes. Resources that the unit's job leaves unused are returned to these nodes, and the other jobs are placed once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from placement.cluster.cluster import (
    MARKET_LABEL,
    SPOT,
    Allocation,
    Cluster,
    Node,
    Resources,
    add_amounts,
    is_split,
    parts,
    slots,
    used_on_nodes,
    without,
)
from placement.cluster.jobs import JobView, worker_kind
from placement.planning.problem import Plan
from placement.text import describe

SPAN_LABEL = "elastic-ray.io/spans"
"""Label, in a policy's view alone, of the places that a unit may have."""

_JOIN = " & "  # of the members in an imagined node's id

Use: TypeAlias = "Mapping[str, Resources]"
"""What jobs that are not asked about use, by tenant."""

Solver: TypeAlias = "Callable[[Sequence[JobView], Cluster, Use], Plan]"

NOTHING: Use = {}


def spans_nodes(view: JobView, cluster: Cluster) -> bool:
    """True if no node can hold a unit (multi-process worker) of the job, or one of its units currently spans nodes."""
    if view.unit == 1:
        return False
    return any(map(is_split, view.allocation)) or not any(
        slots(node.total, view.bundle) and node.matches(view.selector) for node in cluster.nodes if not node.draining
    )


def find_places(view: JobView, cluster: Cluster, most: int) -> list[str]:
    """Return places for up to ``most`` units: node ids, or strings such as ``n1*4+n2*2`` for units split over nodes.

    A unit is a multi-process worker. It gets a single node if possible, else as few nodes as possible within one
    network domain or GPU type, preferring nodes with the least room. No two places share resources. A node with room
    for several units is returned once for each.
    """
    each = per_process(view)
    nodes = [node for node in cluster.nodes if not node.draining and node.matches(view.selector)]
    room = {node.node_id: slots(node.free, each) for node in nodes}
    domains, types = dict[tuple[str, str], list[str]](), dict[str, list[str]]()
    for node in nodes:
        domains.setdefault((node.gpu_type, node.domain), []).append(node.node_id)
        types.setdefault(node.gpu_type, []).append(node.node_id)
    found: list[str] = []
    while len(found) < most:
        chosen = _best(domains.values(), room, view.unit) or _best(types.values(), room, view.unit)
        if not chosen:
            break
        for node_id, count in chosen.items():
            room[node_id] -= count
        found.append(_place(chosen))
    return found


def _best(groups: Iterable[Sequence[str]], room: Mapping[str, int], unit: int) -> dict[str, int]:
    """Return a unit's processes by node, in the group where it needs the fewest nodes; empty if none has room."""
    found = [(chosen, sum(room[node] for node in group)) for group in groups if (chosen := _within(group, room, unit))]
    return min(found, key=lambda each: (len(each[0]), each[1], sorted(each[0])), default=({}, 0))[0]


def _within(group: Sequence[str], room: Mapping[str, int], unit: int) -> dict[str, int]:
    """Return a unit's processes by node: the roomiest nodes, and finally the tightest that holds the rest."""
    chosen: dict[str, int] = {}
    for node in sorted(group, key=lambda node: (-room[node], node)):
        left = unit - sum(chosen.values())
        if room[node] >= left:
            enough = [each for each in group if each not in chosen and room[each] >= left]
            return {**chosen, min(enough, key=lambda each: (room[each], each)): left}
        if not room[node]:
            break
        chosen[node] = room[node]
    return {}


def _place(chosen: Mapping[str, int]) -> str:
    """Return the place for a unit with these processes; see ``cluster.parts``."""
    several = len(chosen) > 1
    return "+".join(f"{node}*{count}" if several else node for node, count in sorted(chosen.items()))


def per_process(view: JobView) -> Resources:
    """Return the resources of one process in the job's units (multi-process workers)."""
    return {name: amount / view.unit for name, amount in view.bundle.items()}


def room_for(view: JobView, cluster: Cluster, most: int) -> int:
    """Return how many of the job's units (multi-process workers) fit on the empty nodes, up to ``most``."""
    empty = Cluster(nodes=tuple(dataclasses.replace(node, free=node.total) for node in cluster.nodes))
    return len(find_places(view, empty, most))


def plan_with_spans(solve: Solver, views: Sequence[JobView], cluster: Cluster, used: Use = NOTHING) -> Plan:
    """Return a policy's plan where units (multi-process workers) that fit on no single node span several nodes.

    Args:
        used: Resources that jobs outside of ``views`` use, keyed by tenant; they count towards its quota.
    """
    wide = [view for view in views if view.unit > 1 and spans_nodes(view, cluster)]
    if not wide:
        return solve(views, cluster, used)
    first = min(wide, key=lambda view: view.arrival)
    kind = worker_kind(first), first.unit
    mine = {view.job: view for view in wide if (worker_kind(view), view.unit) == kind}
    others = [view for view in views if view.job not in mine]
    later = {view.job: view for view in wide if view.job not in mine}
    bundles = {view.job: view.bundle for view in views}
    present = {view.job: _living(view, cluster) for view in views}
    left = without(cluster, {job: present[job] for job in later}, bundles)  # units of other kinds come after
    beside = {view.job: present[view.job] for view in others if view.job not in later}
    merged = _merged(first, _places_of(list(mine.values()), present, left, beside, bundles), left)
    asked = [
        dataclasses.replace(  # with its units at imagined nodes
            view.placed({place.replace("+", _JOIN): workers for place, workers in view.allocation.items()}),
            label_selector={SPAN_LABEL: "yes"},
        )
        if view.job in mine
        else _moved(view, merged)
        for view in views
        if view.job not in later
    ]
    plan = solve(asked, merged, _with_use(used, later.values(), present))
    allocation = {job: {_real(node): n for node, n in at.items()} for job, at in plan.allocation.items()}
    whole = {job: at for job, at in allocation.items() if job in mine}
    why = f"no node holds {describe(first.bundle)}: a unit spans nodes, of one domain if one has room"
    said = {job: reason.with_figures(why) for job, reason in plan.reasons.items() if job in mine}
    granted = {job: {_real(node): n for node, n in at.items()} for job, at in plan.granted.items()}
    plan = dataclasses.replace(plan, allocation=allocation, granted=granted, reasons={**plan.reasons, **said})
    if not later and not any(is_split(place) for job, at in allocation.items() if job not in mine for place in at):
        return plan
    # The others' sizes keep to what the policy has just weighed, beside these jobs, and to all quotas.
    sizes = {job: sum(at.values()) for job, at in allocation.items()}
    again = [view.at_most(sizes[view.job]) for view in others if view.job in sizes]
    beside_whole = _with_use(used, mine.values(), whole)
    rest = plan_with_spans(solve, [*again, *later.values()], without(cluster, whole, bundles), beside_whole)
    has = {job: sum(at.values()) for job, at in rest.allocation.items()}
    reasons = {job: reason for job, reason in rest.reasons.items() if has.get(job) != sizes.get(job)}
    return dataclasses.replace(
        plan,
        allocation={**whole, **rest.allocation},
        reasons={**plan.reasons, **reasons},
        guaranteed=plan.guaranteed | rest.guaranteed,
    )


def _with_use(used: Use, views: Iterable[JobView], allocation: Allocation) -> Use:
    """Return the resources in ``used`` plus what these jobs use."""
    found = {tenant: dict(amounts) for tenant, amounts in used.items()}
    for view in views:
        add_amounts(found.setdefault(view.tenant, {}), view.bundle, sum(allocation.get(view.job, {}).values()))
    return found


def _living(view: JobView, cluster: Cluster) -> dict[str, int]:
    """Return the job's workers keyed by node, leaving out nodes that are gone."""
    nodes = {node.node_id for node in cluster.nodes}
    return {place: workers for place, workers in view.allocation.items() if parts(place).keys() <= nodes}


def _places_of(
    views: Sequence[JobView],
    present: Allocation,
    cluster: Cluster,
    others: Allocation,
    bundles: Mapping[str, Resources],
) -> list[str]:
    """Return disjoint places for units that span nodes: those in use, then idle ones, then other jobs' places."""
    draining = {node.node_id for node in cluster.nodes if node.draining}
    held = (place for view in views for place, n in present[view.job].items() for _ in range(n))
    found = [place for place in held if not parts(place).keys() & draining]
    most = max(sum(view.max_workers for view in views), len(found))
    for beside in (others, {}):
        used = {**beside, **{f" {i}": {place: 1} for i, place in enumerate(found)}}
        needs = {**bundles, **{f" {i}": views[0].bundle for i in range(len(found))}}
        found += find_places(views[0], without(cluster, used, needs), most - len(found))
    return [place for place in found if is_split(place)]


def _merged(first: JobView, places: Sequence[str], cluster: Cluster) -> Cluster:
    """Return the cluster with a virtual node for each place, deducting its resources from the member nodes."""
    nodes, used = cluster.by_id(), used_on_nodes({p: {p: 1} for p in places}, dict.fromkeys(places, first.bundle))
    found = []
    for node in cluster.nodes:
        free = {name: max(n - used.get(node.node_id, {}).get(name, 0.0), 0.0) for name, n in node.free.items()}
        mark = {SPAN_LABEL: "yes"} if node.matches(first.selector) else {}
        found.append(dataclasses.replace(node, free=free, labels={**node.labels, **mark}))
    for place in places:
        members = [nodes[node_id] for node_id in parts(place)]
        common = dict(set.intersection(*(set(node.labels.items()) for node in members)))
        spot = {MARKET_LABEL: SPOT} if any(node.spot for node in members) else {}
        found.append(
            Node(
                node_id=place.replace("+", _JOIN),
                total=first.bundle,
                free=first.bundle,
                labels={**common, **spot, SPAN_LABEL: "yes"},
            )
        )
    return Cluster(nodes=tuple(found))


def _real(node_id: str) -> str:
    return node_id.replace(_JOIN, "+")


def _moved(view: JobView, merged: Cluster) -> JobView:
    """Return the job with its workers on the virtual nodes that have their resources."""
    free = {node.node_id: dict(node.free) for node in merged.nodes}
    found: dict[str, int] = {}
    for place, workers in view.allocation.items():
        for here in (place, *(each for each in free if _JOIN in each and place in parts(_real(each)))):
            stay = min(workers, slots(free.get(here, {}), view.bundle))
            if stay > 0:
                found[here], workers = found.get(here, 0) + stay, workers - stay
                free[here] = {name: amount - stay * view.bundle.get(name, 0.0) for name, amount in free[here].items()}
    return view.placed(found)
