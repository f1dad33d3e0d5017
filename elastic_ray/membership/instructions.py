"""Instructions of the membership machine to its shell: plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_ray.events import EventKind, Pause
from elastic_ray.membership.messages import GenerationSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Instruction: reserve one worker's resources on a node."""

    worker: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Instruction: start a worker whose resources are reserved."""

    worker: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Instruction: free a worker's resources; ``kill`` its process unless it may stay in the warm pool."""

    worker: str
    kill: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Instruction: announce a generation to the workers in ``to``."""

    spec: GenerationSpec
    to: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Instruction: cancel a planned generation for the workers in ``to``."""

    generation: int
    to: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Instruction: record an event of the job."""

    kind: EventKind
    from_workers: int
    to_workers: int
    reason: str
    pause: Pause = dataclasses.field(default_factory=Pause)
    generation: int = 0
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllLost:
    """Instruction: no member with state is alive, so restart from the last checkpoint or end the job."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Instruction: all members have finished, so the job is complete."""


Instruction = Reserve | Launch | Release | Announce | Withdraw | Note | AllLost | Complete
