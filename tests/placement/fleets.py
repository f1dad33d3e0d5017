"""Node types, clusters and jobs for tests of the autoscaler."""

from __future__ import annotations

from typing import Any

from placement.autoscaling.objectives import WantedSize
from placement.autoscaling.objectives.base import Demand
from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, Cluster
from placement.cluster.jobs import JobView, Progress
from placement.cluster.node_types import NodeType
from placement.reasons import Cause, Reason
from tests.placement.views import view

NOW = 1000.0
UNUSED = Reason(Cause.UNUSED)


def candidate(
    name: str, usd: float = 4.0, *, spot: bool = False, cpus: float = 4.0, gpu_label: str = "T4", **fields: Any
) -> NodeType:
    labels = {MARKET_LABEL: "spot" if spot else "on-demand", GPU_TYPE_LABEL: gpu_label}
    fields = {"max_nodes": 4, "startup_s": 50.0, "lasts_h": 12.0 if spot else float("inf"), **fields}
    return NodeType(name=name, resources={"CPU": cpus}, labels=labels, usd_per_h=usd, **fields)


FIRM, SPOT = candidate("firm"), candidate("spot", 1.0, spot=True)


def here(firm: int = 0, spot: int = 0) -> Cluster:
    return Cluster(nodes=(*(FIRM.node(f"f{i}") for i in range(firm)), *(SPOT.node(f"s{i}") for i in range(spot))))


def job(name: str = "a", **fields: Any) -> JobView:
    """A job that scales well and has told how long it is: 9 more epochs of 1000 iterations."""
    done = {"progress": Progress(done=1000.0, epoch_ends=(1000.0,), epochs=10.0), "max_workers": 16}
    return view(name, **{**done, **fields})


class Careless:
    name = "careless"

    def decide(self, demand: Demand, now_s: float) -> dict[str, WantedSize]:
        return {each.job: WantedSize(job=each.job, workers=0, gpu="T4", reason=UNUSED) for each in demand.jobs}
