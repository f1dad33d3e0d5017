"""Jobs and clusters for the tests of this folder."""

from __future__ import annotations

from typing import Any

from placement.allocator.config import AllocatorConfig
from placement.cluster.cluster import Cluster, Node
from placement.cluster.jobs import JobView, TraceJobView
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.step_time import ThroughputModel

AT_ONCE = AllocatorConfig(gather_s=0.0)
"""Each event is decided by itself."""


def node(node_id: str, cpus: float, free: float | None = None, **kwargs: Any) -> Node:
    return Node(node_id=node_id, total={"CPU": cpus}, free={"CPU": cpus if free is None else free}, **kwargs)


def cluster(*cpus: float) -> Cluster:
    return Cluster(nodes=tuple(node(f"n{i}", amount) for i, amount in enumerate(cpus)))


def model(noise: float = 100.0, sync_s: float = 0.01, beta_c: float = 1e-3) -> GoodputModel:
    throughput = ThroughputModel(
        alpha_c=0.02, beta_c=beta_c, alpha_n=2 * sync_s, beta_n=1e-3, alpha_r=sync_s, beta_r=1e-3, gamma=1.5
    )
    return GoodputModel(throughput, NoiseScale(sqr=1.0, var=noise), 64)


def view(job: str, **kwargs: Any) -> JobView:
    """A job of one CPU per worker that scales well, with a fitted model unless told otherwise."""
    fields: dict[str, Any] = {
        "bundle": {"CPU": 1.0},
        "max_workers": 8,
        "goodput": model(),
        "init_batch_size": 64,
        "max_batch_size": 4096,
        "atomic_bsz_range": (8, 512),
        "accumulation": True,
    }
    kind = TraceJobView if {"oracle", "requested_workers", "slow_nodes"} & kwargs.keys() else JobView
    return kind(job=job, **{**fields, **kwargs})
