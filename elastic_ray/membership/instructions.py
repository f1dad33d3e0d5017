"""Instructions from the membership machine to the code that carries them out (plain values)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_ray.events import EventKind, Pause
from elastic_ray.membership.messages import GenerationSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Instruction to reserve one worker's resources on a node."""

    worker: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Instruction to start a worker whose resources are reserved."""

    worker: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Instruction to free a worker's resources; kill its process if ``kill``, otherwise return it to the warm pool."""

    worker: str
    kill: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Instruction to announce a generation to the workers in ``to``."""

    spec: GenerationSpec
    to: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Instruction to cancel a planned generation for the workers in ``to``."""

    generation: int
    to: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Instruction to record an event for the job's user."""

    kind: EventKind
    from_workers: int
    to_workers: int
    reason: str
    pause: Pause = dataclasses.field(default_factory=Pause)
    generation: int = 0
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllLost:
    """Instruction to restart the job from its last checkpoint, or end it, because no living member holds the state."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Instruction to complete the job, because all members have finished."""


Instruction = Reserve | Launch | Release | Announce | Withdraw | Note | AllLost | Complete
