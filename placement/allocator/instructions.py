"""Instructions of the allocator core to its shell, for the jobs' controllers: plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from placement.cluster.jobs import Bill
from placement.knowledge.knowledge import Prior


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Tell the job's controller to have these workers on these nodes; idempotent.

    Attributes:
        nodes: workers per node id; empty lets the job wait.
        reason: the decision's reason, a sentence.
        draining: nodes of its own that are about to go.
    """

    job: str
    nodes: Mapping[str, int]
    reason: str
    draining: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unsatisfiable:
    """Tell the job's controller that no node of this cluster, even empty, could run the job's minimum.

    ``final``: the nodes that the autoscaler could have were counted as well, so that waiting is of no use.
    """

    job: str
    reason: str
    final: bool = False


Instruction: TypeAlias = Allocate | Unsatisfiable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """The answer to a heartbeat.

    Attributes:
        priors: by GPU type, what others of the job's model have measured where the job has no model of its own.
        knows_root: whether the allocator knows where the job's results are; if not, the next heartbeat is to say it.
        bill: what the job has cost so far, for the next heartbeats to say; None where the allocator knows no prices.
        note: what the job's user must be told now, of its deadline, its budget or nodes that cannot be had.
        start_s: of a job without workers, when jobs that run now will have left it room [s]; None: it cannot be told.
        nodes: how many nodes there are that could run a worker of the job, were they empty.
    """

    priors: Mapping[str, Prior]
    knows_root: bool
    bill: Bill | None = None
    note: str = ""
    start_s: float | None = None
    nodes: int = 1
