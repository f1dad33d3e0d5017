"""Clusters and jobs with constraints, and policies that meet them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources
from placement.planning.constraints import Constraints
from placement.planning.plan import make_plan
from placement.planning.problem import Plan
from placement.planning.tenants import Tenant
from placement.policies import POLICIES, Policy, Target, make_policy
from tests.placement.views import cluster, model, view


class Greedy:
    """A user's own policy: whoever was submitted last takes all it can get, and nobody's minimum counts."""

    name = "greedy"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        room = FreeResources(cluster)
        targets = {}
        for job in sorted(jobs, key=lambda job: job.arrival, reverse=True):
            workers = min(job.held_at or job.max_workers, int(room.slots(job).sum()))
            workers = workers if workers >= job.min_workers and room.add(job, workers) else 0
            targets[job.job] = Target(workers=workers, reason="greedy: mine")
        return targets


def policy(name: str) -> Policy:
    return Greedy() if name == "greedy" else make_policy(name)


every = pytest.mark.parametrize("name", [*sorted(POLICIES), "greedy"])


FRUGAL = {name for name in POLICIES if getattr(make_policy(name), "frugal", False)}


def plan(name: str, jobs: Sequence[JobView], nodes: Cluster, rules: Constraints | None = None, **more: Any) -> Plan:
    return make_plan(policy(name), jobs, nodes, more.pop("now_s", 0.0), rules or Constraints(), **more)


def sizes(found: Plan) -> dict[str, int]:
    return {job: sum(place.values()) for job, place in found.allocation.items()}


def carried_out(jobs: Sequence[JobView], found: Plan) -> list[JobView]:
    return [dataclasses.replace(v, allocation=found.allocation.get(v.job, {})) for v in jobs]


@st.composite
def constrained_views(draw: st.DrawFn, bundles: tuple[float, ...] = (1.0,), **fixed: Any) -> list[JobView]:
    jobs = []
    for i in range(draw(st.integers(0, 6))):
        least = draw(st.integers(1, 3))
        fields: dict[str, Any] = {
            "bundle": {"CPU": draw(st.sampled_from(bundles))},
            "min_workers": least,
            "max_workers": draw(st.integers(least, 8)),
            "submitted_s": float(draw(st.integers(0, 3))),
            "goodput": draw(st.sampled_from([None, model(), model(noise=1.0), model(sync_s=0.5)])),
            "most_workers": draw(st.integers(0, 4)),
            "resize_cost_s": draw(st.sampled_from([0.0, 0.2, 10.0])),
            "priority": draw(st.integers(0, 2)),
            "tenant": draw(st.sampled_from(["", "a", "b"])),
            "preemptible": draw(st.booleans()),
            "whole_nodes": draw(st.booleans()),
        }
        jobs.append(view(f"j{i}", **{**fields, **fixed}))
    return jobs


clusters = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(lambda cpus: cluster(*cpus))


rules = st.builds(
    Constraints,
    tenants=st.sampled_from(
        [(), (Tenant(name="a", weight=3.0),), (Tenant(name="a", quota={"CPU": 3}), Tenant(name="b", weight=2.0))]
    ),
    one_multi_node_job_per_node=st.booleans(),
)
