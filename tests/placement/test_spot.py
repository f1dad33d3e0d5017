"""Spot nodes: jobs that avoid them or keep their minimum off them, under every policy; launches and lifetimes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray.autoscaler.v2.schema import LaunchRequest

from placement.autoscaling.autoscaler import Launches, Lifetimes
from placement.cluster.cluster import MARKET_LABEL, Cluster, check
from placement.cluster.jobs import JobView
from placement.cluster.node_types import NodeType, type_of
from placement.planning.plan import make_plan
from placement.planning.spot import on_demand_workers
from placement.policies import POLICIES, make_policy
from placement.ray_cluster.cluster_scaler import Refusal, refusal
from tests.placement.views import node, view

every = pytest.mark.parametrize("name", sorted(POLICIES))


def nodes(on_demand: int, spot: int, cpus: float = 4.0) -> Cluster:
    firm_nodes = [node(f"d{i}", cpus, labels={MARKET_LABEL: "on-demand"}) for i in range(on_demand)]
    return Cluster(nodes=(*firm_nodes, *(node(f"s{i}", cpus, labels={MARKET_LABEL: "spot"}) for i in range(spot))))


@st.composite
def jobs(draw: st.DrawFn) -> list[JobView]:
    found = []
    for i in range(draw(st.integers(1, 5))):
        least = draw(st.integers(1, 3))
        fields: dict[str, Any] = {
            "min_workers": least,
            "max_workers": draw(st.integers(least, 8)),
            "submitted_s": float(i),
            "spot": draw(st.sampled_from(["avoid", "prefer", "mixed"])),
            "priority": draw(st.integers(0, 1)),
        }
        found.append(view(f"j{i}", **fields))
    return found


def job(name: str, use: str, priority: int, least: int, most: int, **fields: Any) -> JobView:
    """A job that arrived in the order of the number in its name."""
    sizes = {"min_workers": least, "max_workers": most}
    return view(name, spot=use, priority=priority, submitted_s=float(name[1:]), **sizes, **fields)


LATE_AVOIDER = [job("j0", "mixed", 1, 2, 5), job("j1", "mixed", 0, 2, 2), job("j2", "avoid", 1, 3, 3)]
"""The second round starts the third job on nodes where the first has its minimum, which gives up the second's too."""

LATE_EARLIER = [
    job("j0", "prefer", 2, 3, 3),
    job("j1", "avoid", 2, 3, 3),
    job("j2", "mixed", 1, 3, 3),
    job("j3", "mixed", 0, 3, 8),
    job("j4", "prefer", 2, 3, 4),
    job("j5", "mixed", 0, 1, 4),
]
"""The second round starts a job that comes before a mixed one, which only the first round has started."""

GROWN = [
    job("j0", "mixed", 1, 3, 3),
    job("j1", "mixed", 0, 1, 6),
    job("j3", "mixed", 0, 2, 3),
    job("j4", "avoid", 1, 2, 4),
]
"""All minimums fit where the last job gives up its growth, not that of a mixed job beyond its minimum."""


@every
@settings(max_examples=12)
@example(views=LATE_AVOIDER, on_demand=1, spot=1)
@example(views=LATE_EARLIER, on_demand=2, spot=1)
@example(views=GROWN, on_demand=2, spot=2)
@given(views=jobs(), on_demand=st.integers(0, 3), spot=st.integers(0, 3))
def test_every_policy_keeps_jobs_where_they_want_to_be(
    name: str, views: list[JobView], on_demand: int, spot: int
) -> None:
    there = nodes(on_demand, spot)
    plan = make_plan(make_policy(name), views, there, 0.0)
    check(plan.allocation, {each.job: each.bundle for each in views}, there)
    for each in views:
        place = plan.allocation.get(each.job, {})
        if each.spot == "avoid":
            assert not any(there.by_id()[node_id].spot for node_id in place)
        if each.spot == "mixed" and place:
            assert on_demand_workers(place, there.by_id()) >= each.min_workers, plan.reasons[each.job]
        assert plan.reasons[each.job]


def test_an_earlier_job_keeps_its_on_demand_minimum() -> None:
    plan = make_plan(make_policy("fifo"), LATE_AVOIDER, nodes(1, 1), 0.0)
    assert plan.allocation == {"j0": {"d0": 2, "s0": 3}, "j1": {"d0": 2}}


def test_growth_gives_way_to_minimums_on_demand() -> None:
    plan = make_plan(make_policy("fifo"), GROWN, nodes(2, 2), 0.0)
    assert plan.allocation.keys() == {"j0", "j1", "j3", "j4"}


@every
def test_a_waiting_mixed_job_does_not_start_on_spot(name: str) -> None:
    plan = make_plan(make_policy(name), [view("a", spot="mixed", min_workers=2)], nodes(0, 2), 0.0)
    assert plan.allocation == {}
    assert str(plan.reasons["a"]) == "waits: on-demand nodes have no room for 2 of its workers"


def test_a_running_mixed_job_continues_after_on_demand_losses() -> None:
    running = view("a", spot="mixed", min_workers=2, allocation={"s0": 2})
    plan = make_plan(make_policy("goodput"), [running], nodes(0, 1), 0.0)
    assert plan.allocation["a"] == {"s0": 4}
    assert str(plan.reasons["a"]) == "on-demand nodes lack room: fewer than 2 of its workers are there"


def test_workers_are_exchanged_for_mixed_jobs_on_demand_minimum() -> None:
    anywhere = view("a", max_workers=4, allocation={"d0": 4})
    mixed = view("b", spot="mixed", min_workers=2, max_workers=4, allocation={"s0": 4}, submitted_s=1.0)
    plan = make_plan(make_policy("fixed"), [anywhere, mixed], nodes(1, 1), 0.0)
    there = nodes(1, 1).by_id()
    assert on_demand_workers(plan.allocation["b"], there) == 2
    assert {job: sum(place.values()) for job, place in plan.allocation.items()} == {"a": 4, "b": 4}


def test_condition_of_the_users_own_on_the_market_stands() -> None:
    assert dict(view("a", spot="avoid").selector) == {MARKET_LABEL: "!spot"}
    assert dict(view("a", spot="avoid", label_selector={MARKET_LABEL: "spot"}).selector) == {MARKET_LABEL: "spot"}


@pytest.mark.parametrize(("field", "value"), [("spot", "never"), ("budget_usd", 0.0), ("budget_usd", float("nan"))])
def test_bad_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} of job 'a' must be"):
        view("a", **{field: value})


# Launches and lifetimes
# ----------------------------------------------------------------------------------------------------------------------

SPOT = NodeType(name="spot", resources={"CPU": 4.0}, labels={MARKET_LABEL: "spot"}, startup_s=60.0, lasts_h=4.0)


def why_closed(launches: Launches, now_s: float) -> str:
    """Why no spot node is asked for, with all figures."""
    why = launches.closed("spot", now_s)
    assert why is not None
    return why.explained


def test_what_does_not_come_is_closed_and_retried_later() -> None:
    launches = Launches([SPOT], timeout_s=40.0, retry_s=600.0)
    for now_s in (0.0, 50.0, 99.0):
        launches.watch({"spot": 2}, {"spot": 0}, now_s)
        assert launches.closed("spot", now_s) is None
    launches.watch({"spot": 2}, {"spot": 0}, 100.0)
    assert why_closed(launches, 100.0) == "no more for now: 2 x spot did not come in 100 s; asked again in 600 s"
    assert launches.closed("spot", 700.0) is None
    launches.watch({"spot": 2}, {"spot": 0}, 700.0)
    launches.watch({"spot": 2}, {"spot": 0}, 800.0)
    assert "asked again in 1200 s" in why_closed(launches, 800.0)


@pytest.mark.parametrize("there", [0, 1])
def test_the_time_until_a_type_is_retried_doubles(there: int) -> None:
    launches, times = Launches([SPOT], timeout_s=40.0, retry_s=600.0), []
    now_s = 0.0
    for _ in range(5):
        launches.watch({"spot": there + 1}, {"spot": there}, now_s)
        launches.watch({"spot": there + 1}, {"spot": there}, now_s + 100.0)
        times.append(float(why_closed(launches, now_s + 100.0).split()[-2]))
        launches.watch({"spot": there}, {"spot": there}, now_s + 110.0)  # as long as it is closed
        now_s += 100.0 + times[-1]
    assert times == [600.0, 1200.0, 2400.0, 4800.0, 4800.0]


def test_a_node_that_comes_ends_a_row_of_failures() -> None:
    launches = Launches([SPOT], timeout_s=40.0, retry_s=600.0)
    launches.watch({"spot": 3}, {"spot": 2}, 0.0)
    launches.refuse("spot", "none", 0.0)
    launches.watch({"spot": 1}, {"spot": 1}, 300.0)
    launches.watch({"spot": 2}, {"spot": 2}, 700.0)
    launches.refuse("spot", "none", 700.0)
    assert why_closed(launches, 700.0) == "no more for now: none; asked again in 600 s"


def test_a_node_that_comes_gives_the_others_more_time() -> None:
    launches = Launches([SPOT], timeout_s=40.0, retry_s=600.0)
    launches.watch({"spot": 2}, {"spot": 0}, 0.0)
    launches.watch({"spot": 2}, {"spot": 1}, 90.0)
    launches.watch({"spot": 2}, {"spot": 1}, 150.0)
    assert launches.closed("spot", 150.0) is None
    launches.watch({"spot": 2}, {"spot": 1}, 190.0)
    assert launches.closed("spot", 190.0) is not None


def test_refusal_closes_at_once_and_unknown_types_are_ignored() -> None:
    launches = Launches([SPOT], timeout_s=40.0, retry_s=600.0)
    launches.refuse("spot", "InsufficientInstanceCapacity", 5.0)
    launches.refuse("other", "?", 5.0)
    assert why_closed(launches, 5.0) == "no more for now: InsufficientInstanceCapacity; asked again in 600 s"
    assert launches.closed("other", 5.0) is None


@pytest.mark.parametrize(
    ("details", "why"),
    [
        (None, "the launch failed"),
        ("", "the launch failed"),
        (" \n", "the launch failed"),
        ("\nno L4\nat all\n", "no L4"),
    ],
)
def test_a_launch_failures_cause_is_rays_first_line(details: str | None, why: str) -> None:
    told = LaunchRequest("g4dn", "spot", 1, LaunchRequest.Status.FAILED, 4, failed_ts_s=5, details=details)
    assert refusal(told) == Refusal(node_type="spot", at_s=5.0, why=why)


def test_lifetimes_are_hours_over_losses_plus_the_expected_one() -> None:
    lifetimes = Lifetimes([SPOT])
    here = Cluster(nodes=(SPOT.node("a"), SPOT.node("b")))
    lifetimes.watch(here, (), 0.0)
    assert lifetimes.hours("spot") == 4.0
    lifetimes.watch(Cluster(nodes=(SPOT.node("b"),)), (), 3600.0)
    assert lifetimes.hours("spot") == pytest.approx((4.0 + 2.0) / 2)
    lifetimes.watch(Cluster(), ("b",), 7200.0)  # given up, not lost
    assert lifetimes.hours("spot") == pytest.approx((4.0 + 3.0) / 2)


def test_a_surrendered_node_is_no_loss_though_it_drains() -> None:
    lifetimes, here = Lifetimes([SPOT]), SPOT.node("a")
    draining = Cluster(nodes=(dataclasses.replace(here, draining=True),))
    lifetimes.watch(Cluster(nodes=(here,)), (), 0.0)
    lifetimes.watch(draining, ("a",), 0.0)
    lifetimes.watch(draining, (), 0.0)
    lifetimes.watch(Cluster(), (), 0.0)
    assert lifetimes.hours("spot") == 4.0


def test_a_surrendered_node_wanted_again_is_a_loss() -> None:
    lifetimes, here = Lifetimes([SPOT]), SPOT.node("a")
    lifetimes.watch(Cluster(nodes=(here,)), (), 0.0)
    lifetimes.watch(Cluster(nodes=(here,)), ("a",), 0.0)
    lifetimes.watch(Cluster(nodes=(dataclasses.replace(here, draining=True),)), (), 0.0)  # by its cloud
    lifetimes.watch(Cluster(), (), 0.0)
    assert lifetimes.hours("spot") == pytest.approx(4.0 / 2)


def test_a_nodes_type_is_its_group_or_its_looks() -> None:
    assert type_of(SPOT.node("a"), [SPOT]) == "spot"
    assert type_of(node("x", 4.0, labels={MARKET_LABEL: "spot"}), [SPOT]) == "spot"
    assert type_of(node("x", 4.0), [SPOT]) is None
    assert type_of(node("x", 4.0, labels={"ray.io/node-group": "head"}), [SPOT]) is None
