"""Towards the allocator's target: who is not wanted any more, and who makes up the next generation (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_ray.membership.roster import Roster, WorkerPhase, WorkerRecord
from placement.cluster.sizes import ANY_SIZE, AllowedSizes


def surplus(roster: Roster, target: Mapping[str, int]) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
    """Who is too many on each node: members that are to leave, and others to be given back at once.

    Members that are to be replaced leave once as many others are ready, or where the target has no place for them.
    """
    leavers: list[WorkerRecord] = []
    unwanted: list[WorkerRecord] = []
    rank = {w.worker: index for index, w in enumerate(roster.members())}
    flying = {m.worker for m in roster.in_flight.spec.members} if roster.in_flight is not None else set()
    for node, count in roster.present().items():
        excess = count - target.get(node, 0)
        if excess <= 0:
            continue
        here = [w for w in roster.workers.values() if w.node == node and w.stays]
        # Newest first, and members last: what has not joined costs nothing to give back.
        here.sort(key=lambda w: (w.phase is not WorkerPhase.MEMBER, rank.get(w.worker, 0), w.number), reverse=True)
        for record in here[:excess]:
            if record.phase is WorkerPhase.MEMBER:
                leavers.append(record)
            elif record.worker not in flying and not record.has_state:
                unwanted.append(record)
    ready = len(roster.in_phase(WorkerPhase.READY)) - sum(1 for w in unwanted if w.phase is WorkerPhase.READY)
    replaced = [w for w in roster.members() if w.replaced]
    places = sum(target.values()) - sum(1 for w in roster.members() if w.stays) + len(leavers)
    leavers += replaced[: max(0, ready, len(replaced) - max(0, places))]
    return leavers, unwanted


def next_group(
    roster: Roster,
    leavers: Sequence[WorkerRecord],
    *,
    min_workers: int,
    sizes: AllowedSizes = ANY_SIZE,
    patient: bool = True,
    hurry: bool = False,
) -> list[WorkerRecord] | None:
    """Members of the next planned generation by rank; None where it is not worth one.

    It is not announced as long as it would have fewer than ``min_workers``, or for a while a size that is not allowed,
    and more are on their way. Where none are, joiners beyond an allowed size wait; members that are left go on in any
    case. Who leaves hands over to members that stay, so leavers are kept while so few others stay that these would lack
    memory; they go as others have come in their place. A group that is too small for its memory takes in joiners until
    it is not, whether or not its size is allowed.

    Args:
        roster: the workers.
        leavers: members that are to leave.
        min_workers: fewest workers to wait for.
        sizes: how many are to train together.
        patient: whether to wait for an allowed size; the resources of those on their way may never come free.
        hurry: whether a leaver's node is about to go, so that nothing is waited for.
    """
    members = roster.members()
    leaving = {w.worker for w in leavers}
    ready = roster.in_phase(WorkerPhase.READY)
    stay = len(members) - len(leaving)
    fewest = min(sizes.fitting, len(members))
    if ready:  # one of them must find a place, or the leavers would never go
        room = sizes.at_most(max(len(members), stay + len(ready))) or len(members)
        fewest = max(1, min(fewest, room - 1))  # one must bring the state along
    kept = [w.worker for w in members if w.worker in leaving][: max(0, fewest - stay)]
    stayers = [w for w in members if w.worker not in leaving or w.worker in kept]
    group = stayers + ready
    unfit = len(group) < min(min_workers, len(members)) or (patient and not sizes.allow(len(group)))
    if unfit and not hurry and roster.in_phase(WorkerPhase.STARTING, WorkerPhase.RESERVING):
        return None
    return group[: max(sizes.at_most(len(group)), sizes.fitting, len(stayers))]


def first_group(
    roster: Roster, *, wanted: int, most: int, patient: bool, sizes: AllowedSizes = ANY_SIZE
) -> list[WorkerRecord] | None:
    """Members of the first generation, or of the first after all members were lost; None where it has to wait.

    The latter consists of those that hold the state alone, for a world that grows needs a step at which it may.
    One that has loaded an automatic checkpoint is no holder: all that start can load it, and begin with it together.

    Args:
        roster: the workers.
        wanted: fewest workers to begin with.
        most: most workers that can begin, 0 for no limit.
        patient: whether to wait for workers that are starting.
        sizes: how many may begin; holders of a state begin in any case.
    """
    holders = roster.holders()
    group = [w for w in roster.in_phase(WorkerPhase.READY) if w.has_state or not holders]
    if holders:
        newest = max(w.state_generation for w in holders)
        if all(w.state_generation < newest for w in group):
            return None  # who has trained longest is still starting over
        patient = patient and any(w.phase is WorkerPhase.STARTING for w in holders)
    else:
        group = sorted(group, key=lambda w: -w.loaded)[: most or None]
        patient = patient and len(group) != most
        if len(group) < min(wanted, most or wanted):
            return None
        group = group[: sizes.at_most(len(group)) or None]
    return group if group and not patient else None
