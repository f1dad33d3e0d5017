"""Base of every allocation policy, and the admission that policies share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from placement.cluster.cluster import AllocationError, Cluster
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView, speeds
from placement.reasons import Cause, Reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Target of a job: its number of workers, with a reason; 0 lets it wait.

    Attributes:
        workers: how many.
        reason: a sentence of a policy of one's own, or a ``Reason``.
        nodes: workers per node id, of a policy that places the job itself; None leaves it to
            ``placement.cluster.packing``. They must add up to ``workers``.

    Examples:
        >>> from placement import Target
        >>> Target(workers=2, reason="half of the cluster").workers
        2
    """

    workers: int
    reason: Reason | str
    nodes: Mapping[str, int] | None = None


def as_targets(policy: str, answer: object) -> Mapping[str, Target]:
    """Return a policy's answer with plain numbers of workers made targets; what is no number is for the core to refuse.

    Raises AllocationError: it is no mapping (rule ``mapping``).
    """
    if not isinstance(answer, Mapping):
        raise AllocationError("mapping", f"a policy answers with {{job: workers or Target}}, but got {answer!r}")
    targets = {}
    for job, told in answer.items():
        target = told if isinstance(told, Target) else Target(workers=told, reason=Reason(Cause.DECIDED, (policy,)))
        if not isinstance(target.reason, Reason):
            target = dataclasses.replace(target, reason=Reason(Cause.POLICY, (policy, str(target.reason))))
        targets[job] = target
    return targets


@runtime_checkable
class Policy(Protocol):
    """Policy that decides how many workers each job gets; ``placement.cluster.packing`` decides on which nodes.

    Promises that the contract tests hold every registered policy to: a target for every job; never more than
    the cluster has; ``min_workers`` or nothing; never above ``max_workers``; ``held_at`` wherever it fits;
    the order of the jobs does not matter; its own decision, once carried out, is not changed by the same
    input; nothing idle that a job could use. A policy reads no clock and rolls no dice.

    Priorities, tenants, deadlines and the like are none of its business (``placement.planning.constraints``): where
    they matter it is asked several times for one decision, each time about some of the jobs on a part of the cluster.

    A class may say ``rigid = True``: it was published for jobs that run at exactly the batch and count that their
    user asked for, and a simulation then runs them so. It may have ``load_solver()``, which the allocator calls in a
    thread when it starts: for imports that its event loop must not wait for.

    Examples:
        >>> from placement import Cluster, JobView, Target
        >>> class One:
        ...     name = "one"
        ...     def decide(self, jobs, cluster, now_s):
        ...         return {job.job: Target(workers=1, reason="one each") for job in jobs}
        ...
        >>> One().decide([JobView(job="a", bundle={"GPU": 1.0})], Cluster(), 0.0)["a"].workers
        1
    """

    @property
    def name(self) -> str:
        """Name of the policy in reasons and errors."""
        ...

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target per job. ``JobView.allocation`` is what the job has, or is on its way to having, by now."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Admission:
    """Jobs that are admitted to run, before any of them grows."""

    empty: FreeResources  # the cluster's room without any of the jobs
    room: FreeResources  # what is left after every admitted job has its floor
    # workers of each admitted job: its minimum, or for held jobs what they are held at, if it fits
    floors: dict[str, int]
    waiting: dict[str, Reason]  # reason per job that does not run


def admit(jobs: Sequence[JobView], cluster: Cluster) -> Admission:
    """Give every job its minimum or nothing.

    Running jobs come first, then waiting ones, each in the order of arrival; growth comes later and out of
    what is left, so that a waiting job's minimum is served by shrinking others, never below *their* minimum.
    A smaller job may pass a larger one that does not fit. Held jobs are then raised to their number, in the
    order of arrival, as far as that fits.
    """
    room = FreeResources(cluster)
    floors: dict[str, int] = {}
    waiting: dict[str, Reason] = {}
    for view in sorted(jobs, key=lambda view: (view.workers == 0, view.arrival)):
        if room.add(view, view.min_workers):
            floors[view.job] = view.min_workers
            continue
        waiting[view.job] = no_room(view, int(room.slots(view).sum()), len(floors))
    for view in sorted(jobs, key=lambda view: view.arrival):
        if view.job in floors and view.held_at is not None:
            more = min(view.held_at - floors[view.job], int(room.slots(view).sum()))
            if more > 0 and room.add(view, more):
                floors[view.job] += more
    return Admission(empty=FreeResources(cluster), room=room, floors=floors, waiting=waiting)


def grow(order: Sequence[JobView], admission: Admission) -> dict[str, int]:
    """Return the workers of each admitted job once those in ``order`` have taken, in turn, what speeds them up.

    Each job takes the number with the highest speed among those that the room left by the earlier ones allows;
    held jobs stay at their floor. Takes from ``admission.room``.
    """
    counts = dict(admission.floors)
    for view in order:
        if view.job not in counts or view.held_at is not None:
            continue
        floor, slots = counts[view.job], admission.room.slots(view)
        most = min(view.useful_workers, floor + int(slots.sum()))
        if most <= floor:
            continue
        # Nodes are counted as on an empty cluster: only an estimate of how many it will span.
        speed = speeds(view, admission.empty.slots(view).tolist(), most)
        more = int(np.argmax(speed[floor:]))
        if more and admission.room.add(view, more):
            counts[view.job] += more
    return counts


def no_room(view: JobView, fits: int, others: int) -> Reason:
    """Return the reason of a job whose minimum finds no room beside those of others."""
    wanted = f"{view.min_workers} x {describe(view.bundle)}"
    cause = Cause.MEMORY if 1 < view.sizes.fitting == view.min_workers else Cause.NO_ROOM
    return Reason(cause, (wanted, fits), f"the minimum of {others} other jobs comes first")


def held(view: JobView, workers: int) -> Reason | None:
    """Return the reason of a job that its user holds at a size; None of another."""
    if view.held_at is None:
        return None
    whole = workers == view.held_at
    return Reason(Cause.HELD, (workers,)) if whole else Reason(Cause.HELD_IN_PART, (view.held_at, workers))


def describe(bundle: Mapping[str, float]) -> str:
    """Return a bundle for people: ``1 CPU + 2 GPU``."""
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()) if amount > 0)
