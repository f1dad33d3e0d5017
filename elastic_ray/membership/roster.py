"""The membership machine's records: its workers, and the generation that is being entered (pure)."""

from __future__ import annotations

import dataclasses
import enum

from elastic_ray.membership.plan import Plan


class Phase(enum.Enum):
    """Where a worker is in its life."""

    RESERVING = "reserving"
    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    LEAVING = "leaving"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, kw_only=True)
class Worker:
    """What the machine knows of one worker.

    Attributes:
        worker: its id, "w" and a number that grows.
        node: the node that its resources are on.
        phase: where it is in its life.
        since_s: when it came into this phase.
        has_state: whether it is known to hold a trained state; true of every member.
        failed_in: latest generation that failed on it; it waits for a newer one.
        held: generation in which it ran out of memory, with the state that it keeps.
        rebuilt: its ``Ready`` overtook its ``Rerun``.
        failures: planned generations in a row that could not be formed with it as a joiner.
    """

    worker: str
    node: str
    phase: Phase
    since_s: float
    has_state: bool = False
    failed_in: int = -1
    held: int = 0
    rebuilt: bool = False
    failures: int = 0

    @property
    def number(self) -> int:
        """Order of age."""
        return number(self.worker)


@dataclasses.dataclass(slots=True, kw_only=True)
class InFlight:
    """An announced generation that not all members have entered yet.

    Attributes:
        plan: the generation.
        forced: it replaces a broken one: whoever hears of it goes there at once.
        since_s: when it was announced.
        from_workers: workers of the generation before.
        from_state: whether some member was known to hold a trained state; without one, training begins.
        pauses: pause [s] of each worker that has entered.
        failed: workers that could not form its group.
        effective_s: when the first worker was known to have entered.
    """

    plan: Plan
    forced: bool
    since_s: float
    from_workers: int
    from_state: bool
    pauses: dict[str, float] = dataclasses.field(default_factory=dict)
    failed: set[str] = dataclasses.field(default_factory=set)
    effective_s: float | None = None

    @property
    def begun(self) -> bool:
        """Whether its members go there now, whatever else happens."""
        return self.forced or self.effective_s is not None


def number(worker: str) -> int:
    """Order of age of a worker's id."""
    return int(worker[1:])
