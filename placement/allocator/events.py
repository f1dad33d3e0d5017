"""What the allocator core is told, what it answers, and what it remembers: plain values."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TypeAlias

from placement.cluster.cluster import Cluster, Node
from placement.cluster.jobs import JobView
from placement.knowledge.records import Measurements
from placement.text import printable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobHeartbeat:
    """A job's controller says how the job stands; the first one is the job's arrival.

    Attributes:
        view: the job.
        cluster: the cluster with what this job holds counted as usable, where the news of the job change that
            (an unknown job's workers count as others' use); None if it is as it was.
    """

    view: JobView
    cluster: Cluster | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """A job is over and gives back everything.

    Attributes:
        job: its name.
        view: how it stood at last, None where nobody can say.
    """

    job: str
    view: JobView | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodesChanged:
    """The cluster as it is now.

    Attributes:
        cluster: its nodes.
        obtainable: nodes that are not there, but that the autoscaler could have; a job that fits onto these is not
            impossible, it waits.
    """

    cluster: Cluster
    obtainable: tuple[Node, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Time has passed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What earlier jobs have measured was read from where it is kept."""

    measurements: Measurements


class Trigger(str, enum.Enum):
    """What leads to a decision; of several the first is named."""

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


Event: TypeAlias = JobHeartbeat | JobEnded | NodesChanged | TimePassed | Recalled


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """One line of the decision log: what changed for one job, and why.

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
    """What the allocator knows of one job."""

    view: JobView
    target: Mapping[str, int]
    reason: str
    heard_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CoreSnapshot:
    """The allocator at one moment, for the CLI, dashboards and tests."""

    policy: str
    settled: bool
    cluster: Cluster
    jobs: Mapping[str, JobState]
    log: tuple[DecisionRecord, ...]
