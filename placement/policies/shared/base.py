"""Base of every allocation policy, and the admission that policies share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from placement.cluster.cluster import AllocationError, Cluster
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView, speeds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Target of a job: its number of workers, with a reason; 0 lets it wait.

    Attributes:
        workers: how many.
        reason: a sentence.
        nodes: workers per node id, of a policy that places the job itself; None leaves it to
            ``placement.cluster.packing``. They must add up to ``workers``.
    """

    workers: int
    reason: str
    nodes: Mapping[str, int] | None = None


def as_targets(policy: str, answer: object) -> Mapping[str, Target]:
    """A policy's answer with plain numbers of workers made targets; what is no number is for the core to refuse.

    Raises AllocationError: it is no mapping (rule ``mapping``).
    """
    if not isinstance(answer, Mapping):
        raise AllocationError("mapping", f"a policy answers with {{job: workers or Target}}, but got {answer!r}")
    return {
        job: told if isinstance(told, Target) else Target(workers=told, reason=f"decided by {policy}")
        for job, told in answer.items()
    }


@runtime_checkable
class Policy(Protocol):
    """Decides how many workers each job gets. Which nodes they run on is ``placement.cluster.packing``'s decision.

    Promises that the contract tests hold every registered policy to: a target for every job; never more than
    the cluster has; ``min_workers`` or nothing; never above ``max_workers``; ``held_at`` wherever it fits;
    the order of the jobs does not matter; its own decision, once carried out, is not changed by the same
    input; nothing idle that a job could use. A policy reads no clock and rolls no dice.

    Priorities, tenants, deadlines and the like are none of its business (``placement.planning.constraints``): where
    they matter it is asked several times for one decision, each time about some of the jobs on a part of the cluster.

    A class may say ``rigid = True``: it was published for jobs that run at exactly the batch and count that their
    user asked for, and a simulation then runs them so. It may have ``load_solver()``, which the allocator calls in a
    thread when it starts: for imports that its event loop must not wait for.
    """

    @property
    def name(self) -> str:
        """The name that reasons and errors carry."""
        ...

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Target per job. ``JobView.allocation`` is what the job has, or is on its way to having, by now."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Admission:
    """Jobs that are admitted to run, before any of them grows.

    Attributes:
        empty: the cluster's room without any of the jobs.
        room: what is left after every admitted job has its floor.
        floors: workers of each admitted job: its minimum, or for held jobs what they are held at, if it fits.
        waiting: reason per job that does not run.
    """

    empty: FreeResources
    room: FreeResources
    floors: dict[str, int]
    waiting: dict[str, str]


def admit(jobs: Sequence[JobView], cluster: Cluster) -> Admission:
    """Give every job its minimum or nothing.

    Running jobs come first, then waiting ones, each in the order of arrival; growth comes later and out of
    what is left, so that a waiting job's minimum is served by shrinking others, never below *their* minimum.
    A smaller job may pass a larger one that does not fit. Held jobs are then raised to their number, in the
    order of arrival, as far as that fits.
    """
    room = FreeResources(cluster)
    floors: dict[str, int] = {}
    waiting: dict[str, str] = {}
    for view in sorted(jobs, key=lambda view: (view.workers == 0, view.arrival)):
        if room.add(view, view.min_workers):
            floors[view.job] = view.min_workers
            continue
        fits = int(room.slots(view).sum())
        waiting[view.job] = (
            f"waits: needs at least {view.min_workers} x {describe(view.bundle)}, "
            f"but beside the minimum of {len(floors)} other jobs {fits} fit"
        )
    for view in sorted(jobs, key=lambda view: view.arrival):
        if view.job in floors and view.held_at is not None:
            more = min(view.held_at - floors[view.job], int(room.slots(view).sum()))
            if more > 0 and room.add(view, more):
                floors[view.job] += more
    return Admission(empty=FreeResources(cluster), room=room, floors=floors, waiting=waiting)


def grow(order: Sequence[JobView], admission: Admission) -> dict[str, int]:
    """Workers of each admitted job once those in ``order``, one after the other, have taken what speeds them up.

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


def held_reason(view: JobView, workers: int) -> str:
    """Return the reason for a held job's workers."""
    wanted = count(view.held_at or 0)
    return f"held at {wanted}" if workers == view.held_at else f"held at {wanted}, of which {workers} fit now"


def count(workers: int) -> str:
    """A number of workers for people: ``1 worker``, ``2 workers``."""
    return "1 worker" if workers == 1 else f"{workers} workers"


def describe(bundle: Mapping[str, float]) -> str:
    """A bundle for people: ``1 CPU + 2 GPU``."""
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()) if amount > 0)
