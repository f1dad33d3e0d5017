"""What every allocation policy is, and the admission that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from placement.cluster import Cluster
from placement.jobs import JobView
from placement.room import Room


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How many workers a job is to have, and why; 0 lets it wait.

    Later kinds of decision (a GPU type, a node shape) become further fields with defaults.
    """

    workers: int
    reason: str


@runtime_checkable
class Policy(Protocol):
    """Decides how many workers each job gets. Which nodes they run on is ``placement.packing``'s decision.

    Promises that the contract tests hold every registered policy to: a target for every job; never more than
    the cluster has; ``min_workers`` or nothing; never above ``max_workers``; ``held_at`` wherever it fits;
    the order of the jobs does not matter; its own decision, once carried out, is not changed by the same
    input; nothing idle that a job could use. A policy reads no clock and rolls no dice.
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
    """Who runs at all, before anybody grows.

    Attributes:
        room: what is left after every admitted job has its floor.
        floors: workers of each admitted job: its minimum, or for held jobs what they are held at, if it fits.
        waiting: reason per job that does not run.
    """

    room: Room
    floors: dict[str, int]
    waiting: dict[str, str]


def admit(jobs: Sequence[JobView], cluster: Cluster) -> Admission:
    """Give every job its minimum or nothing.

    Running jobs come first, then waiting ones, each in the order of arrival; growth comes later and out of
    what is left, so that a waiting job's minimum is served by shrinking others, never below *their* minimum.
    A smaller job may pass a larger one that does not fit. Held jobs are then raised to their number, in the
    order of arrival, as far as that fits.
    """
    room = Room(cluster)
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
    return Admission(room=room, floors=floors, waiting=waiting)


def held_reason(view: JobView, workers: int) -> str:
    """Why a held job has what it has."""
    wanted = count(view.held_at or 0)
    return f"held at {wanted}" if workers == view.held_at else f"held at {wanted}, of which {workers} fit now"


def count(workers: int) -> str:
    """A number of workers for people: ``1 worker``, ``2 workers``."""
    return "1 worker" if workers == 1 else f"{workers} workers"


def describe(bundle: Mapping[str, float]) -> str:
    """A bundle for people: ``1 CPU + 2 GPU``."""
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()) if amount > 0)
