"""Signals to the membership machine: plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_ray.events import Pause


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Something that happened to one worker."""

    worker: str


class Reserved(Signal):
    """Signal: the worker's resources are reserved."""


class Left(Signal):
    """Signal: the worker's train function has unwound after it left a generation."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Signal):
    """Signal: the worker's train function has returned, so training is complete for this rank.

    Attributes:
        steps: committed steps of all loaders.
    """

    rank: int = 0
    steps: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rerun(Signal):
    """Signal: the worker ran out of memory and rebuilds in its process; ``has_state`` if it kept a whole state."""

    has_state: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Signal):
    """Signal: the worker has built everything and waits for a generation.

    Attributes:
        has_state: it kept a trained state in memory, which is lost with it.
        loaded: steps of the automatic checkpoint that it has loaded, as all others can; 0 without one.
    """

    has_state: bool = False
    loaded: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Signal):
    """Signal: the worker died or hung; its process is, or will be, gone.

    Attributes:
        cause: why, as a sentence.
        newcomer: it is given up as a joiner that is of no use, so that the next one waits.
    """

    cause: str
    newcomer: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed(Signal):
    """A collective of ``generation`` failed on it; it waits for the next generation."""

    generation: int
    cause: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFailed(Signal):
    """Signal: the worker could not form the group of ``generation``."""

    generation: int
    cause: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Switched(Signal):
    """Signal: the worker trains in ``generation`` now.

    Attributes:
        pause: the time since its last committed step.
        proof: that its state is that of the others, as an event's ``detail`` has it.
    """

    generation: int
    pause: Pause
    proof: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """The allocator's word: how many workers on which node, and why.

    Attributes:
        nodes: workers by node.
        reason: why, as a sentence.
        draining: nodes that are about to go: who leaves them waits for nobody.
    """

    nodes: Mapping[str, int]
    reason: str
    draining: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Signal: exactly these members must leave once others are ready in their places."""

    workers: frozenset[str]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Time has passed."""


Stimulus = Signal | Allocated | Replace | TimePassed
