"""Instructions of the allocator core for the jobs' controllers, delivered by its shell: plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from placement.cluster.jobs import Bill, FoundStrategy
from placement.knowledge.knowledge import Prior
from placement.reasons import Reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Instruction: the job's controller must have these workers on these nodes; idempotent."""

    job: str
    nodes: Mapping[str, int]  # workers per node id; empty lets the job wait
    reason: Reason  # the decision's
    draining: tuple[str, ...] = ()  # nodes of its own that are about to go


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unsatisfiable:
    """Instruction: the controller is notified that no node, even empty, could run the job's minimum.

    ``final``: nodes that the autoscaler could add were considered as well, so waiting is useless.
    """

    job: str
    reason: Reason
    final: bool = False


Instruction: TypeAlias = Allocate | Unsatisfiable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """The allocator's answer to a heartbeat of a job's controller."""

    # by GPU type, what others of the job's model have measured where the job has no model of its own
    priors: Mapping[str, Prior]
    knows_root: bool  # whether the allocator knows where the job's results are; if not, the next heartbeat is to say it
    # what the job has cost so far, for the next heartbeats to say; None where the allocator knows no prices
    bill: Bill | None = None
    note: str = ""  # what the job's user must be told now, of its deadline, its budget or nodes that cannot be had
    # of a job without workers, when jobs that run now will have left it room [s]; None: it cannot be told
    start_s: float | None = None
    # the fastest strategies that jobs of the model have found, by the form of the group; None: its model is not known
    strategies: Mapping[str, FoundStrategy] | None = None
    nodes: int = 1  # how many nodes there are that could run a worker of the job, were they empty
