"""What the allocator core asks its shell to tell the jobs' controllers: plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Tell the job's controller to have these workers on these nodes; idempotent.

    Attributes:
        job: whom to tell.
        nodes: workers per node id; empty lets the job wait.
        reason: the decision's reason, a sentence.
        repeated: the job was told before and is not there yet.
    """

    job: str
    nodes: Mapping[str, int]
    reason: str
    repeated: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unsatisfiable:
    """Tell the job's controller that no node of this cluster, even empty, could run the job's minimum.

    ``final``: the nodes that the autoscaler could have were counted as well, so that waiting is of no use.
    """

    job: str
    reason: str
    final: bool = False


Instruction: TypeAlias = Allocate | Unsatisfiable
