"""Instructions of the membership machine to its shell: plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_ray.events import EventKind, Pause
from elastic_ray.membership.messages import GenerationSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Reserve one worker's resources on a node."""

    worker: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start a worker whose resources are reserved."""

    worker: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give a worker's resources back; ``kill`` its process unless it may rest in the warm pool."""

    worker: str
    kill: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Notify ``to`` of a generation."""

    spec: GenerationSpec
    to: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Notify ``to`` that a planned generation is withdrawn."""

    generation: int
    to: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Record an event of the job."""

    kind: EventKind
    from_workers: int
    to_workers: int
    reason: str
    pause: Pause = dataclasses.field(default_factory=Pause)
    generation: int = 0
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllLost:
    """No member with state lives: restart from the last checkpoint, or give up."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Instruction: all members have finished, so the job is complete."""


Instruction = Reserve | Launch | Release | Announce | Withdraw | Note | AllLost | Complete
