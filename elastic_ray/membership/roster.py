"""Records of the membership machine: its workers, and the announced generation that they are entering (pure)."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping
from typing import Any

from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.signals import Switched


class WorkerPhase(enum.Enum):
    """Phase of a worker, from the request for its resources until it leaves or finishes."""

    RESERVING = "reserving"
    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    LEAVING = "leaving"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, kw_only=True)
class WorkerRecord:
    """Record of one worker in the membership machine."""

    worker: str  # its id, "w" and a number that grows
    node: str  # the node that its resources are on
    phase: WorkerPhase  # where it is in its life
    since_s: float  # when it came into this phase
    has_state: bool = False  # whether it is known to hold a trained state; true of every member
    loaded: int = 0  # steps of the automatic checkpoint that it has loaded; 0 without one
    failed_in: int = -1  # latest generation that failed on it; it waits for a newer one
    state_generation: int = 0  # generation in which it ran out of memory, with the state that it keeps
    rebuilt: bool = False  # its ``Ready`` overtook its ``Rerun``
    failures: int = 0  # planned generations in a row that could not be formed with it as a joiner
    replaced: bool = False  # it is to go once another is ready in its place
    joined_others: bool = False  # it is a member of a group that had trained before it came

    @property
    def stays(self) -> bool:
        """True if the worker is neither leaving its group nor marked for replacement."""
        return self.phase is not WorkerPhase.LEAVING and not self.replaced

    @property
    def number(self) -> int:
        """Number in the worker's id; older workers have lower numbers."""
        return number(self.worker)

    def enter(self, phase: WorkerPhase, now_s: float) -> None:
        """Enter a phase at ``now_s`` [s]."""
        self.phase, self.since_s = phase, now_s

    def built(self, now_s: float, *, loaded: int, has_state: bool) -> None:
        """Mark the worker as ready for a generation, with the values of its ``Ready`` signal."""
        self.enter(WorkerPhase.READY, now_s)
        self.loaded, self.has_state = loaded, has_state or self.has_state

    def start_over(self, now_s: float, *, state_generation: int, has_state: bool) -> None:
        """Record that the worker is rerunning its train function; with ``has_state``, it keeps its state."""
        self.enter(WorkerPhase.READY if self.rebuilt else WorkerPhase.STARTING, now_s)
        self.has_state, self.rebuilt, self.state_generation = has_state, False, state_generation

    def join(self, now_s: float, *, others: bool) -> None:
        """Make the worker a member of a generation; ``others`` is True if other members are already training."""
        self.enter(WorkerPhase.MEMBER, now_s)
        self.failures, self.joined_others = 0, others


@dataclasses.dataclass(slots=True, kw_only=True)
class InFlight:
    """Announced generation that some members have not entered yet."""

    spec: GenerationSpec
    forced: bool  # it replaces a broken one: a worker that hears of it goes there at once
    since_s: float  # when it was announced
    from_workers: int  # workers of the generation before
    from_state: bool  # whether some member was known to hold a trained state; without one, training begins
    # steps of the furthest automatic checkpoint that a member has loaded; training continues from there
    loaded: int = 0
    pauses: dict[str, Pause] = dataclasses.field(default_factory=dict)  # pause of each worker that has entered
    failed: set[str] = dataclasses.field(default_factory=set)  # workers that could not form its group
    effective_s: float | None = None  # when the first worker was known to have entered
    proof: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what the first one reported of its state

    @property
    def begun(self) -> bool:
        """True once the members are certain to enter the generation, so that it can no longer be cancelled."""
        return self.forced or self.effective_s is not None

    @property
    def pause(self) -> Pause:
        """Longest pause in training of any worker that entered the generation; zero for the first generation."""
        longest = max(self.pauses.values(), key=lambda pause: pause.pause_s, default=Pause())
        return longest if self.from_workers else Pause()

    def entered(self, told: Switched) -> None:
        """Record that a worker has entered the generation."""
        self.pauses[told.worker] = told.pause
        self.proof = self.proof or told.proof


def number(worker: str) -> int:
    """Return the number in a worker's id; older workers have lower numbers."""
    return int(worker[1:])


class Roster:
    """Workers of a job, with its current generation and the announced one; this class only answers queries."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerRecord] = {}  # every worker that exists or is asked for, by id
        self.current: GenerationSpec | None = None  # the generation in effect, None before the first
        self.in_flight: InFlight | None = None  # the announced generation, None when all have entered

    @property
    def world_size(self) -> int:
        """Number of workers in the current generation; 0 before the first."""
        return self.current.world_size if self.current is not None else 0

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 before the first."""
        return self.current.generation if self.current is not None else 0

    def present(self) -> dict[str, int]:
        """Return the number of workers, keyed by node, except workers leaving or marked for replacement."""
        return dict(Counter(w.node for w in self.workers.values() if w.stays))

    def watched(self) -> set[str]:
        """Return the workers that are expected to send heartbeats."""
        return {w.worker for w in self.in_phase(WorkerPhase.READY, WorkerPhase.MEMBER)}

    def members(self) -> list[WorkerRecord]:
        """Return living members in rank order."""
        order = [m.worker for m in self.current.members] if self.current is not None else []
        rank = {worker: index for index, worker in enumerate(order)}
        living = [w for w in self.workers.values() if w.phase is WorkerPhase.MEMBER]
        return sorted(living, key=lambda w: (rank.get(w.worker, len(order)), w.number))

    def in_phase(self, *phases: WorkerPhase) -> list[WorkerRecord]:
        """Return the workers in any of these phases, oldest first."""
        chosen = [w for w in self.workers.values() if w.phase in phases]
        return sorted(chosen, key=lambda w: w.number)

    def holders(self) -> list[WorkerRecord]:
        """Return the workers that have a process and are known to hold a trained state."""
        return [w for w in self.in_phase(WorkerPhase.STARTING, WorkerPhase.READY, WorkerPhase.MEMBER) if w.has_state]

    def is_planned(self, worker: str) -> bool:
        """True if the worker is a member of the announced generation."""
        return self.in_flight is not None and self.in_flight.spec.rank_of(worker) is not None

    def planned(self) -> list[WorkerRecord]:
        """Return the announced generation's joiners that have not reported entering it yet."""
        return [w for w in self.in_phase(WorkerPhase.READY) if self.is_planned(w.worker)]

    @property
    def expects_joiners(self) -> bool:
        """True if any worker is starting, or is ready and waiting to become a member of a group."""
        return bool(self.in_phase(WorkerPhase.STARTING, WorkerPhase.READY))

    def entering(self) -> list[WorkerRecord]:
        """Return :meth:`planned` (joiners yet to enter) once the announced generation is certain; empty before."""
        return self.planned() if self.in_flight is not None and self.in_flight.begun else []

    def silent(self, flight: InFlight) -> list[WorkerRecord]:
        """Return living members of an announced generation that have neither entered it nor reported a failure."""
        told = flight.pauses.keys() | flight.failed
        return [
            w
            for w in self.in_phase(WorkerPhase.READY, WorkerPhase.MEMBER)
            if flight.spec.rank_of(w.worker) is not None and w.worker not in told
        ]
