"""Recovery of the membership machine after a controller restart, from the workers' reports (pure).

The workers' reports are authoritative: workers continue to train without their controller, and each knows which
generation it has entered. Announced generations that no worker has entered are cancelled. Every other fact is
passed to the machine as the signal that would normally have reported it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.roster import InFlight, WorkerPhase, WorkerRecord, number
from elastic_ray.membership.signals import Ready, Signal, StepFailed, Switched


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SurvivingWorker:
    """State of a living worker, as reported by the worker itself."""

    worker: str
    node: str
    # the generation that it has taken up, or left as no member of it; None before its first
    spec: GenerationSpec | None = None
    switched: int = 0  # the latest generation in which it has exchanged state; 0 before its first
    ready: Ready | None = None  # what it told when it had built its model; None before
    failed: StepFailed | None = None  # its failed collective, where it waits for the generation after that; else None
    pause: Pause = dataclasses.field(default_factory=Pause)  # that of its last change
    proof: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what it reported of its state then
    starts_over: bool = False  # it ran out of memory, and builds its model anew with the state that it keeps

    @property
    def leaving(self) -> bool:
        """True if the worker's latest generation does not include the worker, which is therefore leaving its group."""
        return self.spec is not None and self.spec.rank_of(self.worker) is None

    @property
    def veteran(self) -> bool:
        """True if the worker has trained and is not leaving.

        A worker enters a generation only after all ranks have agreed on it, or after the previous one broke.
        """
        return self.spec is not None and self.switched > 0 and not self.leaving


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Roster of the surviving workers, and the signals that the workers sent while no controller was running."""

    workers: dict[str, WorkerRecord]  # the living, by id
    current: GenerationSpec | None  # the generation in effect
    in_flight: InFlight | None  # the one that some of them have entered, and not all
    issued: int  # the latest generation that one of them has entered
    gone: tuple[str, ...]  # members of that which do not live any more
    since: tuple[Signal, ...]  # what the living have to tell, in order


def recover(survivors: Sequence[SurvivingWorker], *, world_size: int, now_s: float) -> Recovered:
    """Return the roster of the workers that survived the previous controller, and the signals missed since then.

    Args:
        survivors: All living workers; every other worker counts as lost.
    """
    specs = {w.spec.generation: w.spec for w in survivors if w.spec is not None and w.veteran}
    newest = specs[max(specs)] if specs else None
    records = {w.worker: _record(w, newest, now_s) for w in sorted(survivors, key=lambda w: number(w.worker))}
    if newest is None:
        return Recovered(workers=records, current=None, in_flight=None, issued=_latest(survivors), gone=(), since=())
    by_name = {w.worker: w for w in survivors}
    members = [by_name[m.worker] for m in newest.members if m.worker in by_name]
    through = [w for w in members if w.switched == newest.generation]
    before = specs.get(max((w.switched for w in survivors if w.veteran and w.switched < newest.generation), default=0))
    flight = None
    if len(through) < len(members):
        flight = InFlight(
            spec=newest,
            forced=newest.void_below >= newest.generation,
            since_s=now_s,
            from_workers=before.world_size if before is not None else world_size,
            from_state=True,
        )
    since: list[Signal] = []
    if flight is not None:
        told = newest.generation
        since += [Switched(worker=w.worker, generation=told, pause=w.pause) for w in through]
    since += [w.failed for w in survivors if w.failed is not None]
    return Recovered(
        workers=records,
        current=newest if flight is None else before,  # none where no worker remembers it: it is over in a moment
        in_flight=flight,
        issued=_latest(survivors),
        gone=tuple(m.worker for m in newest.members if m.worker not in by_name),
        since=tuple(since),
    )


def _record(survivor: SurvivingWorker, newest: GenerationSpec | None, now_s: float) -> WorkerRecord:
    """Return the membership record of a surviving worker."""
    # A worker that trained before, and is no member of the newest, leaves, or the others have continued.
    passed_over = survivor.veteran and newest is not None and newest.rank_of(survivor.worker) is None
    if survivor.leaving or passed_over:
        phase = WorkerPhase.LEAVING
    elif survivor.veteran:
        phase = WorkerPhase.MEMBER
    else:
        phase = WorkerPhase.STARTING if survivor.ready is None else WorkerPhase.READY
    ready, failed = survivor.ready, survivor.failed
    return WorkerRecord(
        worker=survivor.worker,
        node=survivor.node,
        phase=phase,
        since_s=now_s,
        has_state=survivor.starts_over or survivor.veteran or (ready is not None and ready.has_state),
        loaded=ready.loaded if ready is not None else 0,
        failed_in=failed.generation if failed is not None else -1,
        state_generation=(newest.generation if newest is not None else 1) if survivor.starts_over else 0,
    )


def _latest(survivors: Sequence[SurvivingWorker]) -> int:
    return max((w.spec.generation for w in survivors if w.spec is not None), default=0)
