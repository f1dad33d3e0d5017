"""Placement of elastic jobs on a cluster: the value of resources to each job, and their allocation.

Importing this package loads neither Ray nor torch; only ``placement.ray_cluster`` and the allocator's
``actor``, ``controllers`` and ``packed_policy`` communicate with Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.lazy_names import lazy_names

if TYPE_CHECKING:
    from placement.allocator.actor import PolicyConflictError, get_or_create_allocator
    from placement.allocator.config import AllocatorConfig
    from placement.autoscaling.autoscaler import AutoscalerConfig, Autoscaling
    from placement.cluster.cluster import Cluster, Node
    from placement.cluster.jobs import JobView
    from placement.cluster.node_types import NodeType
    from placement.cluster.sizes import MemoryNeed
    from placement.errors import InputError
    from placement.planning.tenants import Tenant
    from placement.policies.shared.base import Policy, Target
    from placement.ray_cluster.notices import NoticeConfig

# Loaded on first use: the simulator needs no Ray.
_HOMES = {
    "placement.allocator.actor": "PolicyConflictError get_or_create_allocator",
    "placement.allocator.config": "AllocatorConfig",
    "placement.autoscaling.autoscaler": "AutoscalerConfig Autoscaling",
    "placement.cluster.cluster": "Cluster Node",
    "placement.cluster.jobs": "JobView",
    "placement.cluster.sizes": "MemoryNeed",
    "placement.cluster.node_types": "NodeType",
    "placement.errors": "InputError",
    "placement.planning.tenants": "Tenant",
    "placement.policies.shared.base": "Policy Target",
    "placement.ray_cluster.notices": "NoticeConfig",
}

__all__ = [
    "AllocatorConfig",
    "AutoscalerConfig",
    "Autoscaling",
    "Cluster",
    "InputError",
    "JobView",
    "MemoryNeed",
    "Node",
    "NodeType",
    "NoticeConfig",
    "Policy",
    "PolicyConflictError",
    "Target",
    "Tenant",
    "get_or_create_allocator",
]

__getattr__, __dir__ = lazy_names("placement", _HOMES)
