"""Slow nodes: left by the job that has seen it, by all jobs where several have, and never for a smaller job."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from placement.allocator.significance import trigger_of
from placement.allocator.snapshot import Trigger
from placement.cluster.cluster import Cluster, check
from placement.cluster.jobs import JobView
from placement.planning.failing_nodes import avoid_slow
from placement.planning.plan import make_plan
from placement.policies.goodput.policy import GoodputPolicy
from tests.placement.views import cluster, view


def placed(views: list[JobView], nodes: Cluster) -> list[JobView]:
    """The jobs where the default policy puts them."""
    plan = make_plan(GoodputPolicy(), views, nodes, 0.0)
    check(plan.allocation, {each.job: each.bundle for each in views}, nodes)
    return [each.placed(plan.allocation.get(each.job, {})) for each in views]


def test_job_leaves_the_slow_node_and_keeps_its_size() -> None:
    job = view("a", allocation={"n0": 2}, held_at=2, slow_nodes={"n0": 3.0})
    (moved,) = placed([job], cluster(4, 4))
    assert moved.allocation == {"n1": 2}
    assert placed([moved], cluster(4, 4))[0].allocation == {"n1": 2}, "it stays away for as long as it remembers"


def test_others_leave_a_node_that_two_jobs_saw_slow() -> None:
    nodes = cluster(4, 4, 4)
    a = view("a", allocation={"n1": 1}, held_at=1, slow_nodes={"n0": 3.0})
    b = view("b", allocation={"n0": 4}, held_at=4)
    c = view("c", allocation={"n2": 1}, held_at=1, slow_nodes={})
    assert [each.allocation for each in placed([a, b, c], nodes)] == [{"n1": 1}, {"n0": 4}, {"n2": 1}]
    c = dataclasses.replace(c, slow_nodes={"n0": 2.0})
    assert all("n0" not in each.allocation for each in placed([a, dataclasses.replace(b, held_at=3), c], nodes))


def test_no_job_shrinks_or_waits_for_it() -> None:
    full = view("a", allocation={"n0": 2, "n1": 2}, held_at=4, slow_nodes={"n0": 3.0})
    assert placed([full], cluster(2, 2))[0].allocation == {"n0": 2, "n1": 2}
    two = [view(job, min_workers=2, max_workers=2, slow_nodes={"n0": 3.0}) for job in "ab"]
    assert all(each.workers == 2 for each in placed(two, cluster(2, 2)))


def test_a_little_slow_is_no_reason() -> None:
    job = view("a", allocation={"n0": 2}, held_at=2, slow_nodes={"n0": 1.3})
    assert placed([job], cluster(4, 4))[0].allocation == {"n0": 2}


def test_healthy_jobs_are_planned_as_before() -> None:
    views, nodes = [view("a"), view("b")], cluster(4, 4)
    assert avoid_slow(views, nodes)[0] is views and avoid_slow(views, nodes)[1] is nodes


def test_node_that_has_become_slow_calls_for_a_decision() -> None:
    before = view("a", slow_nodes={})
    assert trigger_of(before, dataclasses.replace(before, slow_nodes={"n0": 2.0})) is Trigger.NODES
    seen = dataclasses.replace(before, slow_nodes={"n0": 2.0})
    assert trigger_of(seen, dataclasses.replace(before, slow_nodes={"n0": 2.1})) is None


@given(
    cpus=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    seen=st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=3),
)
def test_no_job_is_left_without_workers_for_slowness(cpus: list[int], seen: list[set[int]]) -> None:
    nodes = cluster(*cpus)
    views = [
        view(f"j{number}", max_workers=3, submitted_s=float(number), slow_nodes={f"n{node}": 3.0 for node in slow})
        for number, slow in enumerate(seen)
    ]
    healthy = placed([dataclasses.replace(each, slow_nodes={}) for each in views], nodes)
    assert sum(1 for each in placed(views, nodes) if each.workers) >= sum(1 for each in healthy if each.workers)
