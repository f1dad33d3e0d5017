"""Signals to the membership machine (plain values)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_ray.events import Pause


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Event that concerns one worker."""

    worker: str


class Reserved(Signal):
    """Signal that the worker's resources are reserved."""


class Left(Signal):
    """Signal that the worker has left its generation, and that its train function has ended."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Signal):
    """Signal that the worker's train function has returned, so that its rank has finished training."""

    rank: int = 0
    steps: int = 0  # committed steps of all loaders


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rerun(Signal):
    """Signal that the worker ran out of memory and is rerunning; ``has_state`` if it keeps its state."""

    has_state: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Signal):
    """Signal that the worker has built its model and is waiting for a generation."""

    has_state: bool = False  # it kept a trained state in memory, which is lost with it
    loaded: int = 0  # steps of the automatic checkpoint that it has loaded, as all others can; 0 without one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Signal):
    """Signal that the worker died or hung, so that its process is gone or will be killed."""

    cause: str  # why, as a sentence
    newcomer: bool = False  # it is given up as a joiner that is of no use, so that the next one waits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed(Signal):
    """Signal that a collective of group ``generation`` failed on the worker, which is waiting for the next group."""

    generation: int
    cause: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFailed(Signal):
    """Signal that the worker could not form the group of generation number ``generation``."""

    generation: int
    cause: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Switched(Signal):
    """Signal that the worker has entered group number ``generation`` and is training in it."""

    generation: int
    pause: Pause  # the time since its last committed step
    # that its state is that of the others, as an event's ``detail`` has it
    proof: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Signal that the allocator has decided how many workers run on each node."""

    nodes: Mapping[str, int]  # workers by node
    reason: str  # why, as a sentence
    # nodes that are about to go, with the time from which on who leaves them waits for nobody [s, the machine's clock]
    draining: Mapping[str, float] = dataclasses.field(default_factory=dict)
    nodes_may_come: bool = False  # whether others may come in place of these


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Signal that the listed members must leave once replacements are ready; it replaces any earlier such signal."""

    workers: frozenset[str]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Signal that time has passed, so that timeouts are checked."""


Stimulus = Signal | Allocated | Replace | TimePassed
