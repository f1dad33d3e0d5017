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
    """A job's controller says how the job stands; the first one is the job's arrival.

    Attributes:
        cluster: the cluster with what this job holds counted as usable, where the news of the job change that
            (an unknown job's workers count as others' use); None if it is as it was.
    """

    view: JobView
    cluster: Cluster | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """A job is over and gives back everything.

    Attributes:
        view: how it stood at last, None where it is not known.
        cluster: the cluster with what the job's workers still hold counted as others' use; None if it is as it was.
    """

    job: str
    view: JobView | None = None
    cluster: Cluster | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodesChanged:
    """The cluster as it is now.

    Attributes:
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
    """Event: the measurements of earlier jobs were read from storage."""

    measurements: Measurements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeForgiven:
    """An operator has mended a node: its failures are forgotten."""

    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged:
    """An operator has changed the settings of the cluster.

    Attributes:
        tenants: as ``AllocatorConfig`` has them.
    """

    tenants: tuple[Tenant, ...] = ()
    priorities: Mapping[str, int] = dataclasses.field(default_factory=dict)


Event: TypeAlias = JobHeartbeat | JobEnded | NodesChanged | NodeForgiven | SettingsChanged | TimePassed | Recalled
