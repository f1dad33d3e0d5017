"""Overview of the entire cluster: the summary strip, the tenants' shares, and the requested nodes (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from elastic_ray.events import JobPhase
from elastic_ray.observe.page.model import PageJob, PageNode, SlotCount, Strip, TenantShare, WantedNodes
from elastic_ray.observe.page.rows import slots_of
from placement.allocator.slot_use import SlotUse, slot_uses
from placement.allocator.snapshot import AllocatorLook, JobState
from placement.cluster.cluster import add_amounts
from placement.cluster.jobs import JobView, WorkerKind, speeds, worker_kind
from placement.cluster.packing import FreeResources
from placement.goodput.remaining import remaining
from placement.planning.tenants import Tenant, entitlements


def strip(look: AllocatorLook, jobs: Sequence[PageJob], nodes: Sequence[PageNode]) -> Strip:
    """Return the cluster's one-line summary at the top of the page."""
    states = look.core.jobs
    now, one_each, equal = _speeds([(each.view, sum(each.target.values())) for each in states.values()], look)
    return Strip(
        slots=_slots(look, jobs, nodes),
        running=sum(1 for each in jobs if each.workers),
        waiting=sum(1 for each in jobs if not each.workers and each.phase != JobPhase.PAUSED.value),
        held=sum(1 for each in jobs if each.held_at is not None),
        usd_per_h=look.scaling.usd_per_h if look.scaling is not None else None,
        speed=now,
        speed_one_each=one_each,
        speed_equal=equal,
        decided_s=look.decided_s,
        decision_cpu_s=look.decision_cpu_s,
        policy=look.core.policy,
        settled=look.core.settled,
    )


def _slots(look: AllocatorLook, jobs: Sequence[PageJob], nodes: Sequence[PageNode]) -> tuple[SlotCount, ...]:
    """Return slots by GPU type; workers that do not train yet are starting."""
    training = {each.job: each.workers for each in jobs}
    uses = slot_uses(look.core.cluster.nodes, look.core.jobs.values(), training)
    found: dict[str, list[SlotUse]] = {}
    for row in nodes:  # one that the allocator does not know yet is idle
        found.setdefault(row.type, []).append(uses.get(row.node, SlotUse(idle=row.slots)))
    return tuple(SlotCount(type=name, **_summed(found[name])) for name in sorted(found))


def _summed(uses: Sequence[SlotUse]) -> dict[str, int]:
    """Return the number of slots in each state as whole numbers, whose sum is that of all slots."""
    counts, before, total = dict[str, int](), 0, 0.0
    for field in dataclasses.fields(SlotUse):
        total += sum(getattr(each, field.name) for each in uses)
        counts[field.name] = round(total) - before
        before = round(total)
    return counts


def _speeds(
    sizes: Sequence[tuple[JobView, int]], look: AllocatorLook
) -> tuple[float | None, float | None, float | None]:
    """Return the jobs' summed speeds at these sizes, at their smallest sizes, and at equal shares of the slots.

    A job's speed is relative to its smallest size. All three are None while no job has a model.
    """
    if not any(view.goodput is not None for view, _ in sizes):
        return None, None, None
    room = FreeResources(look.core.cluster)
    total = sum(slots_of(node.free) for node in look.core.cluster.nodes if not node.draining)
    most: dict[WorkerKind, list[int]] = {}  # thousands of jobs share a few kinds of workers
    curves = []
    for view, workers in sizes:
        kind = worker_kind(view)
        if kind not in most:
            most[kind] = sorted(map(int, room.slots(view).tolist()), reverse=True)
        curves.append((view, workers, speeds(view, _enough(most[kind], view.useful_workers))))
    now = sum(float(curve[min(workers, len(curve) - 1)]) for _, workers, curve in curves)
    each, left = total / max(len(sizes), 1), total
    one, equal = 0.0, 0.0
    for view, _, curve in sorted(curves, key=lambda entry: entry[0].arrival):
        if view.min_workers <= left and view.min_workers < len(curve):
            left -= view.min_workers
            one += float(curve[view.min_workers])
        equal += float(np.interp(min(each, len(curve) - 1), np.arange(len(curve)), curve))
    return now, one, equal


def _enough(slots: Sequence[int], workers: int) -> Sequence[int]:
    """Return the shortest prefix of ``slots`` (largest first) that holds all workers; the rest changes no speed."""
    room = 0
    for count, each in enumerate(slots, start=1):
        room += each
        if room >= workers:
            return slots[:count]
    return slots


def tenant_shares(look: AllocatorLook) -> tuple[TenantShare, ...]:
    """Return each tenant's cluster shares (a tenant may be a team), sorted by name; empty without jobs or tenants."""
    known = {each.name: each for each in look.tenants}
    states = tuple(look.core.jobs.values())
    names = sorted({state.view.tenant for state in states})
    if not names or (names == [""] and not known):
        return ()
    totals: dict[str, float] = {}
    for node in look.core.cluster.nodes:
        add_amounts(totals, {} if node.draining else node.free, 1)
    jobs = {name: [state for state in states if state.view.tenant == name] for name in names}
    weights = {name: _weight(known.get(name), own) for name, own in jobs.items()}
    whole = sum(weights.values())
    # each tenant's part of its scarcest resource in the planned allocation
    used = {
        name: max((n / totals[r] for r, n in _needs(own).items() if totals.get(r, 0.0) > 0), default=0.0)
        for name, own in jobs.items()
    }
    # what its jobs could use, of all there is, if they had the cluster to themselves
    useful = {name: _needs(own, useful=True) for name, own in jobs.items()}
    demand = {name: {r: min(n, totals.get(r, 0.0)) for r, n in needs.items()} for name, needs in useful.items()}
    fair = entitlements(demand, weights, totals)
    rows = []
    for name, own in jobs.items():
        owed = weights[name] / whole
        rows.append(
            TenantShare(
                tenant=name,
                weight=weights[name],
                owed=owed,
                used=used[name],
                lent=max(owed - max(fair[name], used[name]), 0.0),
                borrowed=max(used[name] - owed, 0.0),
                quota=dict(known[name].quota) if name in known else {},
                jobs=len(own),
                waiting=sum(1 for state in own if not state.target and not state.view.paused),
                fairness=_fairness(own, owed, look),
            )
        )
    return tuple(rows)


def _weight(known: Tenant | None, own: Sequence[JobState]) -> float:
    said = [state.view.tenant_weight for state in own if state.view.tenant_weight is not None]
    return known.weight if known is not None else max(said, default=1.0)


def _needs(own: Sequence[JobState], *, useful: bool = False) -> dict[str, float]:
    """Return the resources of the jobs' planned workers or, with ``useful``, of all workers they could use."""
    amounts: dict[str, float] = {}
    for state in own:
        add_amounts(amounts, state.view.bundle, state.view.useful_workers if useful else sum(state.target.values()))
    return amounts


def _fairness(own: Sequence[JobState], owed: float, look: AllocatorLook) -> float | None:
    """Return the worst finish-time fairness of a tenant's jobs; None if unknown for all of them.

    It is (age + time left) / time on an equal part of the tenant's share (Mahajan et al., "Themis", NSDI 2020). The
    inputs come from the jobs themselves, and each job's age is as of its last heartbeat.
    """
    total = sum(slots_of(node.free) for node in look.core.cluster.nodes)
    part = max(math.floor(owed * total / max(len(own), 1)), 1)
    room, worst = FreeResources(look.core.cluster), None
    for state in own:
        view, missing = state.view, remaining(state.view.progress)
        workers = sum(state.target.values())
        if view.goodput is None or view.progress is None or not missing or not view.init_batch_size or not workers:
            continue
        curve = speeds(view, room.slots(view).tolist())
        now, alone = float(curve[min(workers, len(curve) - 1)]), float(curve[min(part, len(curve) - 1)])
        age_s = max(state.heard_s - view.submitted_s, 1e-3)
        done = view.progress.done
        if now > 0 and alone > 0 and done > 0:
            pace = age_s / done  # seconds of an iteration so far, waits and pauses included
            rho = (age_s + missing * pace) / ((done + missing) * pace * now / alone)
            worst = rho if worst is None else max(worst, rho)
    return worst


def wanted_nodes(look: AllocatorLook, since: Mapping[str, float]) -> tuple[WantedNodes, ...]:
    """Return the nodes that the allocator requests, as rows sorted by type; empty if it does not manage nodes."""
    decision = look.scaling
    if decision is None:
        return ()
    rows = []
    for name in sorted({*decision.nodes, *decision.reasons}):
        wanted, missing = decision.nodes.get(name, 0), decision.add.get(name, 0)
        reason = decision.reasons.get(name)
        if not wanted and reason is None:
            continue
        short = [job for job, size in sorted(decision.wants.items()) if size.workers > _has(look, job)]
        rows.append(
            WantedNodes(
                type=name,
                market="spot" if name in look.spot_types else "on-demand",
                wanted=wanted,
                missing=missing,
                since_s=since.get(name) if missing else None,
                jobs=tuple(short) if missing else (),
                reason=str(reason or ""),
                figures=reason.figures if reason is not None else "",
            )
        )
    return tuple(rows)


def _has(look: AllocatorLook, job: str) -> int:
    state = look.core.jobs.get(job)
    return sum(state.target.values()) if state is not None else 0
