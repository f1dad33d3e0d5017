"""Events that the allocator core handles, and instructions that it returns for the jobs' controllers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from placement.cluster.cluster import Cluster, Node
from placement.cluster.jobs import Bill, FoundStrategy, JobView
from placement.knowledge.knowledge import Prior
from placement.knowledge.records import Measurements
from placement.planning.tenants import Tenant
from placement.reasons import Reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobHeartbeat:
    """Event: a job's controller reports the job's state. The first report counts as the job's arrival.

    Attributes:
        cluster: Updated cluster if the job was unknown before. An unknown job's workers count as used by others;
            in this cluster, they count as usable. None if the cluster is unchanged.
    """

    view: JobView
    cluster: Cluster | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """Event: a job has ended and releases all its resources."""

    job: str
    view: JobView | None = None  # how it stood at last, None where it is not known
    # the cluster with what the job's workers still hold counted as others' use; None if it is as it was
    cluster: Cluster | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodesChanged:
    """Event: the cluster's nodes have changed.

    Attributes:
        obtainable: Nodes that do not exist yet but that the autoscaler could request. A job that fits on these waits
            instead of being rejected as impossible.
    """

    cluster: Cluster
    obtainable: tuple[Node, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Event: time has passed, so the core must check for due decisions and silent jobs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """Event: measurements of earlier jobs have been loaded from storage."""

    measurements: Measurements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeForgiven:
    """Event: an operator has repaired a node, so its record of failures is cleared."""

    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged:
    """Event: an operator has changed the cluster's settings."""

    tenants: tuple[Tenant, ...] = ()  # as ``AllocatorConfig`` has them
    priorities: Mapping[str, int] = dataclasses.field(default_factory=dict)


Event: TypeAlias = JobHeartbeat | JobEnded | NodesChanged | NodeForgiven | SettingsChanged | TimePassed | Recalled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Instruction: the job's controller must place its workers on these nodes; idempotent."""

    job: str
    nodes: Mapping[str, int]  # workers per node id; empty lets the job wait
    reason: Reason  # the decision's
    # nodes of its own that are about to go, with the time until then [s], 0 where that is not known
    draining: Mapping[str, float] = dataclasses.field(default_factory=dict)
    nodes_may_come: bool = False  # whether the autoscaler may get the job a node in place of these


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unsatisfiable:
    """Instruction: the job's controller must be informed that no node, even if empty, could run the job's minimum.

    If ``final``, nodes that the autoscaler could add were considered too, so there is no point in waiting.
    """

    job: str
    reason: Reason
    final: bool = False


Instruction: TypeAlias = Allocate | Unsatisfiable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """Allocator's reply to a heartbeat from a job's controller."""

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
