"""Events of the allocator core: plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from placement.cluster.cluster import Cluster, Node
from placement.cluster.jobs import JobView
from placement.knowledge.records import Measurements
from placement.planning.tenants import Tenant


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobHeartbeat:
    """Event: a job's controller reports the job's state; the first report is the job's arrival.

    Attributes:
        cluster: The cluster with this job's resources counted as usable, if the job was unknown before
            (an unknown job's workers count as others' use); None if the cluster is unchanged.
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
    """Event: the cluster has changed.

    Attributes:
        obtainable: Nodes that do not exist yet but that the autoscaler could request; a job that fits onto these
            waits instead of being impossible.
    """

    cluster: Cluster
    obtainable: tuple[Node, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Event: time has passed, so that the core checks for due decisions and silent jobs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """Event: the measurements of earlier jobs have been read from storage."""

    measurements: Measurements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeForgiven:
    """Event: an operator has repaired a node, so its failures are discarded."""

    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged:
    """Event: an operator has changed the settings of the cluster."""

    tenants: tuple[Tenant, ...] = ()  # as ``AllocatorConfig`` has them
    priorities: Mapping[str, int] = dataclasses.field(default_factory=dict)


Event: TypeAlias = JobHeartbeat | JobEnded | NodesChanged | NodeForgiven | SettingsChanged | TimePassed | Recalled
