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
        cluster: the cluster with what this job holds counted as usable, where the news of the job change that
            (an unknown job's workers count as others' use); None if it is as it was.
    """

    view: JobView
    cluster: Cluster | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """Event: a job is over and releases everything."""

    job: str
    view: JobView | None = None  # how it stood at last, None where it is not known
    # the cluster with what the job's workers still hold counted as others' use; None if it is as it was
    cluster: Cluster | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodesChanged:
    """Event: the cluster as it is now.

    Attributes:
        obtainable: nodes that are not there, but that the autoscaler could have; a job that fits onto these is not
            impossible, it waits.
    """

    cluster: Cluster
    obtainable: tuple[Node, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Event: time has passed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """Event: the measurements of earlier jobs were read from storage."""

    measurements: Measurements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeForgiven:
    """Event: an operator has mended a node, whose failures are forgotten."""

    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged:
    """Event: an operator has changed the settings of the cluster."""

    tenants: tuple[Tenant, ...] = ()  # as ``AllocatorConfig`` has them
    priorities: Mapping[str, int] = dataclasses.field(default_factory=dict)


Event: TypeAlias = JobHeartbeat | JobEnded | NodesChanged | NodeForgiven | SettingsChanged | TimePassed | Recalled
