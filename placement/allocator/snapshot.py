"""Snapshot of the allocator: its jobs, and the log of its decisions with their triggers. Plain values."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from placement.autoscaling.autoscaler import ScalingDecision
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.cluster.node_record import NodeHistory
from placement.planning.constraints import Constraints
from placement.planning.tenants import Tenant
from placement.text import printable


class Trigger(str, enum.Enum):
    """Trigger of a decision; if there are several, the first is named."""

    ARRIVAL = "arrival"
    """A job has come."""
    END = "end"
    """A job is over."""
    NODES = "nodes"
    """The nodes have changed."""
    LIMITS = "limits"
    """What a job may have has changed."""
    WEIGHT = "weight"
    """What a job's speed counts has changed."""
    MODEL = "model"
    """What is known of a job's speed has changed."""
    REFRESH = "refresh"
    """Nothing has happened for long."""
    SILENCE = "silence"
    """A job sends no heartbeats any more, and was dropped."""
    REFUSED = "refused"
    """The policy's answer was invalid, and nothing changed."""

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """Record of one decision: the change for one job, and its reason.

    Attributes:
        time_s: the ``now_s`` of the event.
        trigger: what led to the decision.
        job: the job; of a refusal, empty.
        from_workers: planned workers before.
        to_workers: planned workers after.
        nodes: planned workers per node id after.
        reason: a sentence.
    """

    time_s: float
    trigger: Trigger
    job: str
    from_workers: int
    to_workers: int
    nodes: Mapping[str, int]
    reason: str

    def __str__(self) -> str:
        if not self.job:
            return printable(f"decision {self.trigger}: {self.reason}")
        change = f"{self.from_workers}->{self.to_workers} workers"
        return printable(f"job {self.job}: {change} ({self.trigger}; {self.reason})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of one job in the allocator."""

    view: JobView
    target: Mapping[str, int]
    reason: str
    heard_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CoreSnapshot:
    """The allocator at one moment, for the CLI, dashboards and tests.

    Attributes:
        node_failures: living nodes on which workers have failed.
    """

    policy: str
    settled: bool
    cluster: Cluster
    jobs: Mapping[str, JobState]
    log: tuple[DecisionRecord, ...]
    node_failures: tuple[NodeHistory, ...] = ()
    constraints: Constraints = Constraints()  # noqa: RUF009  # it is frozen


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorLook:
    """The allocator as the page looks at it, again and again: of the log only what is new.

    Attributes:
        core: its ``log`` holds the records that are new, oldest first.
        recorded: decision records so far, those that are kept no more included: the number of the last one.
        life: differs from one allocator to the one after it, whose numbers start anew.
        scaling: the last decision about the cluster's size; None where it decides none.
        spot_types: node types whose nodes may be taken away.
        decision_cpu_s: CPU time of the last decision [s]; None before the first.
        decided_s: when that was [s since the epoch]; None before the first.
    """

    core: CoreSnapshot
    recorded: int
    life: str
    tenants: tuple[Tenant, ...] = ()
    scaling: ScalingDecision | None = None
    spot_types: frozenset[str] = frozenset()
    decision_cpu_s: float | None = None
    decided_s: float | None = None
