"""What a job's workers tell a controller that Ray has restarted, as the membership machine needs it (pure).

The workers hold the truth: they train on without their controller, and each knows which generation it has entered.
Generations that were announced and that no worker has entered are called off; every other fact is told to the machine
in the words in which it would have come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic_ray.membership.plan import Plan
from elastic_ray.membership.roster import InFlight, Phase, Worker, number
from elastic_ray.membership.signals import Signal, StepFailed, Switched


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A living worker.

    Attributes:
        worker: its id.
        node: its node.
        plan: the generation that it has entered, or left as no member of it; None before its first.
        ready: whether it has built its model.
        has_state: whether it holds a trained state.
        failed: generation whose collective failed on it, where it waits for the one after that; -1 elsewhere.
        cause: why that failed.
        pause_s: pause of its last change [s].
        starts_over: it ran out of memory, and builds its model anew.
    """

    worker: str
    node: str
    plan: Plan | None = None
    ready: bool = False
    has_state: bool = False
    failed: int = -1
    cause: str = ""
    pause_s: float = 0.0
    starts_over: bool = False

    @property
    def member(self) -> bool:
        """Whether it is a member of the generation that it knows."""
        return self.plan is not None and self.plan.rank_of(self.worker) is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A roster to begin with, and what has happened since.

    Attributes:
        workers: the living, by id.
        current: the generation in effect.
        in_flight: the one that some of them have entered, and not all.
        issued: the latest generation that one of them has entered.
        gone: members of that which do not live any more.
        since: what the living have to tell, in order.
    """

    workers: dict[str, Worker]
    current: Plan | None
    in_flight: InFlight | None
    issued: int
    gone: tuple[str, ...]
    since: tuple[Signal, ...]


def recover(witnesses: Sequence[Witness], *, world_size: int, now_s: float) -> Recovered:
    """The roster that living workers make up.

    Args:
        witnesses: all living workers; the others count as lost.
        world_size: workers of the generation in effect, as last noted down.
        now_s: the time [s].
    """
    entered = {w.plan.generation: w.plan for w in witnesses if w.plan is not None and w.member}
    if not entered:
        workers = {w.worker: _record(w, None, None, now_s) for w in witnesses}
        return Recovered(workers=workers, current=None, in_flight=None, issued=_latest(witnesses), gone=(), since=())
    oldest, newest = entered[min(entered)], entered[max(entered)]
    by_name = {w.worker: w for w in witnesses}
    behind = [
        m.worker
        for m in newest.members
        if (w := by_name.get(m.worker)) is not None and (w.plan is None or w.plan.generation < newest.generation)
    ]
    # Where its members are not through, the generation before is in effect still, as far as anybody remembers it.
    current = newest if not behind else oldest if oldest is not newest else None
    workers = {w.worker: _record(w, current, newest, now_s) for w in witnesses}
    flight = None
    since: list[Signal] = []
    if behind:
        flight = InFlight(
            plan=newest,
            forced=newest.void_below >= newest.generation,
            since_s=now_s,
            from_workers=oldest.world_size if oldest is not newest else world_size,
            from_state=any(w.has_state or w.member for w in witnesses),
        )
        since += [
            Switched(worker=w.worker, generation=newest.generation, pause_s=w.pause_s)
            for w in witnesses
            if w.member and w.plan == newest
        ]
    since += [
        StepFailed(worker=w.worker, generation=w.failed, cause=w.cause) for w in witnesses if w.failed >= _entered(w)
    ]
    return Recovered(
        workers=dict(sorted(workers.items(), key=lambda item: number(item[0]))),
        current=current,
        in_flight=flight,
        issued=max(_latest(witnesses), newest.generation),
        gone=tuple(m.worker for m in newest.members if m.worker not in by_name),
        since=tuple(since),
    )


def _record(witness: Witness, current: Plan | None, newest: Plan | None, now_s: float) -> Worker:
    if witness.plan is not None and not witness.member:
        phase = Phase.LEAVING
    elif current is not None and current.rank_of(witness.worker) is not None and witness.plan is not None:
        phase = Phase.MEMBER
    elif witness.ready:
        phase = Phase.READY
    else:
        phase = Phase.STARTING
    return Worker(
        worker=witness.worker,
        node=witness.node,
        phase=phase,
        since_s=now_s,
        has_state=witness.has_state or witness.starts_over or witness.member,
        failed_in=witness.failed,
        held=newest.generation if witness.starts_over and newest is not None else int(witness.starts_over),
    )


def _entered(witness: Witness) -> int:
    return witness.plan.generation if witness.plan is not None else 0


def _latest(witnesses: Sequence[Witness]) -> int:
    return max((_entered(w) for w in witnesses), default=0)
