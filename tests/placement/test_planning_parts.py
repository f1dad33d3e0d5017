"""Parts of a decision, worked out by hand: sizes that are cut, parts of a cluster, who gives way, who leaves a node."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from placement.cluster.cluster import GPU_TYPE_LABEL, MARKET_LABEL, SPOT, Cluster
from placement.cluster.jobs import JobView
from placement.cluster.sizes import AllowedSizes, MemoryNeed
from placement.goodput.fitting import Observation
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.step_time import ThroughputModel
from placement.planning.constraints import Constraints, guarantee, in_allowed_sizes, in_whole_nodes, without_idle_spot
from placement.planning.multi_node import held_up
from placement.planning.plan import unsatisfiable
from placement.planning.problem import Plan, Problem
from placement.planning.spot import on_demand_workers
from placement.planning.tenants import Tenant, within
from placement.planning.wishes import grant, without_wish
from placement.reasons import Cause, Reason
from tests.placement.dated import dated
from tests.placement.views import cluster, node, view

TWOS = AllowedSizes(sizes=(2, 4))


def planned(**places: dict[str, int]) -> Plan:
    return Plan(allocation=places, reasons=dict.fromkeys(places, Reason(Cause.UNUSED)))


def test_sizes_that_stay_wrong_are_cut_where_fewest_are() -> None:
    asked: list[list[int]] = []

    def stubborn(problem: Problem) -> Plan:
        asked.append([each.max_workers for each in problem.views])
        return planned(a={"n0": 3, "n1": 2}, b={"n1": 1}, c={"n0": 2, "n1": 1, "n2": 1})

    views = [view("a", sizes=TWOS), view("b", sizes=TWOS), view("c", sizes=AllowedSizes(multiple_of=3), min_workers=3)]
    plan = in_allowed_sizes(Problem(views=views, cluster=cluster(8, 8, 8)), stubborn)
    assert plan.allocation == {"a": {"n0": 3, "n1": 1}, "c": {"n0": 2, "n2": 1}}, "b has no allowed size"
    assert plan.reasons["a"].explained.startswith("its sizes allow 4 of the 5 workers that fit")
    assert asked == [[8, 8, 8], *[[4, 8, 3]] * 3]


def test_jobs_are_asked_again_with_smaller_sizes() -> None:
    def greedy(problem: Problem) -> Plan:
        return planned(**{each.job: {"n0": each.held_at or each.max_workers} for each in problem.views})

    views = [view("a", sizes=TWOS, max_workers=3), view("b", sizes=TWOS, max_workers=5, held_at=3, wished=5)]
    seen: list[JobView] = []
    plan = in_allowed_sizes(
        Problem(views=views, cluster=cluster(9)), lambda problem: (seen.extend(problem.views), greedy(problem))[1]
    )
    assert plan.allocation == {"a": {"n0": 2}, "b": {"n0": 2}}
    assert [(each.max_workers, each.held_at, each.wished) for each in seen] == [
        *((3, None, None), (5, 3, 5), (2, None, None), (2, 2, 2))
    ]


def whole(workers: int, left: float, **facts: Any) -> int:
    """Workers that a job gets for which a whole node is worth four; so much is free beside it then."""

    def solve(problem: Problem) -> Plan:
        return planned(
            a={"n0": min(problem.views[0].max_workers, 4), "n1": min(problem.views[0].max_workers, workers) - 4}
        )

    views = [view("a", max_workers=workers, whole_nodes=True, **facts)]
    nodes = Cluster(nodes=(node("n0", 4), node("n1", 4, free=workers - 4 + left)))
    plan = in_whole_nodes(Problem(views=views, cluster=nodes), solve, {"a": 4})
    return sum(plan.allocation["a"].values())


def test_sizes_are_rounded_to_whole_nodes_unless_that_idles() -> None:
    def solve(problem: Problem) -> Plan:
        asked.append(problem.views[0].max_workers)
        others = {"b": {"n1": 4}} if problem.views[0].max_workers == 4 else {"b": {"n1": 2}}
        return planned(a={"n0": 4, "n1": problem.views[0].max_workers - 4}, **others)

    for least, held, expected in ((1, None, [6, 4]), (5, None, [6]), (1, 6, [6])):
        asked: list[int] = []
        views = [view("a", max_workers=6, min_workers=least, held_at=held), view("b")]
        plan = in_whole_nodes(Problem(views=views, cluster=cluster(4, 4)), solve, {"a": 4})
        assert asked == expected and sum(plan.allocation["a"].values()) == expected[-1]
    assert whole(6, left=0.0) == 6, "two slots would idle"
    assert whole(8, left=0.0) == 8 and whole(4, left=0.0) == 4


def parts(ceiling: dict[str, float], first: Any = None, *views: JobView, **names: Any) -> dict[str, float]:
    problem = Problem(views=list(views) or [view("a", bundle={"CPU": 2.0})], cluster=names.get("on", cluster(8, 8)))
    return {each.node_id: each.free["CPU"] for each in within(problem, ceiling, first or {}).cluster.nodes}


def test_a_part_of_the_cluster_holds_whole_workers() -> None:
    assert parts({"CPU": 7.0}) == {"n0": 6.0, "n1": 0.0}
    assert parts({"CPU": 11.0}) == {"n0": 8.0, "n1": 2.0}
    assert parts({"CPU": 99.0}) == {"n0": 8.0, "n1": 8.0}
    assert parts({}) == {"n0": 8.0, "n1": 8.0} and parts({"GPU": 1.0}) == {"n0": 8.0, "n1": 8.0}
    mixed = view("a", bundle={"CPU": 2.0}), view("b", bundle={"CPU": 1.0})
    assert parts({"CPU": 7.0}, None, *mixed) == {"n0": 7.0, "n1": 0.0}, "bundles differ"
    assert parts({"CPU": 3.0}, {"a": {"n1": 1}}) == {"n0": 0.0, "n1": 2.0}, "half a worker is for nobody"
    here = view("a", bundle={"CPU": 2.0}, allocation={"n1": 1})
    assert parts({"CPU": 5.0}, None, here) == {"n0": 0.0, "n1": 4.0}, "it begins where it is"
    assert parts({"CPU": 4.0}, {"a": {"n0": 1}}, here) == {"n0": 2.0, "n1": 2.0}
    assert parts({"CPU": 6.0}, on=cluster(1, 4)) == {"n0": 0.0, "n1": 4.0}, "no node that holds no worker"
    assert parts({"CPU": 6.0}, on=cluster(4, 8)) == {"n0": 0.0, "n1": 6.0}, "the roomiest"


def test_guarantees_come_by_right_then_promise_then_arrival() -> None:
    """Each needs four of eight workers to end in 26 s; alone, two would be enough for 50."""
    a, b, c = (dated(name, 1026.0, submitted_s=float(i)) for i, name in enumerate("abc"))

    def promised(*views: JobView, before: tuple[str, ...] = (), cpus: int = 8) -> set[str]:
        return set(guarantee(views, cluster(cpus), before, 1000.0, {})[0].guaranteed)

    assert promised(a, b, c) == {"a", "b"} and promised(a, b, c, before=("c",)) == {"a", "c"}
    assert promised(a, b, dataclasses.replace(c, priority=1)) == {"a", "c"}
    assert promised(a, b, cpus=7) == {"a"} and promised(a, view("d"), b, cpus=8) == {"a", "b"}
    assert promised(a, view("d", preemptible=False, allocation={"n0": 1}), b) == {"a"}
    problem, notes = guarantee([a, view("d")], cluster(8), (), 1000.0, {})
    assert [each.min_workers for each in problem.views] == [4, 1] and set(notes) == {"a"}
    problem, notes = guarantee([a], cluster(8), (), 1000.0, {"a": "told so"})
    assert problem.views == [a] and "told so" in notes["a"].explained


@pytest.mark.parametrize(
    ("seen", "alpha_n", "most", "bound"),
    [
        ((2, 4), 0.21, 10, True),  # 0.21 + 0.05 x 2 > 0.2 + 0.01 x 10
        ((2, 4), 0.2, 10, False),
        ((2, 4), 0.21, 12, False),
        ((2, 6), 0.2, 10, True),
        ((1, 4), 9.0, 10, False),  # on one node
        ((2, 2), 0.31, 10, True),
        ((2, 2), 0.3, 10, False),
    ],
)
def test_links_hold_up_jobs_that_wait_longest(seen: tuple[int, int], alpha_n: float, most: int, bound: bool) -> None:
    times = ThroughputModel(alpha_c=0.2, beta_c=0.01, alpha_n=alpha_n, beta_n=0.05, alpha_r=0.0, beta_r=0.0, gamma=1.0)
    job = view(
        "a",
        goodput=GoodputModel(times, NoiseScale(sqr=1.0, var=1.0), 64),
        atomic_bsz_range=(1, most),
        observations={"": (Observation(*seen, 8, 0, 1.0), Observation(1, 9, 8, 0, 1.0))},
    )
    assert held_up([job, dataclasses.replace(job, job="b")]) is bound
    assert not held_up([job, view("b")]) and not held_up([job, dataclasses.replace(job, atomic_bsz_range=None)])


def test_spot_nodes_are_counted_apart_and_left_while_idle() -> None:
    spot = {"labels": {MARKET_LABEL: SPOT}}
    nodes = Cluster(nodes=(node("n0", 4), node("s0", 4, **spot), node("s1", 4, **spot)))
    assert on_demand_workers({"n0": 2, "s0": 3, "gone": 4}, nodes.by_id()) == 2
    runs = view("a", allocation={"s0": 1})
    left = without_idle_spot(Problem(views=[runs, view("b")], cluster=nodes))
    assert left is not None and [each.node_id for each in left.cluster.nodes] == ["n0", "s0"]
    assert without_idle_spot(Problem(views=[view("b")], cluster=nodes)) is None
    both = view("a", allocation={"s0": 1, "s1": 1})
    assert without_idle_spot(Problem(views=[both], cluster=nodes)) is None


def granted(
    view_: JobView, place: Mapping[str, int], *others: Any, nodes: Cluster | None = None, quota: float = 99.0
) -> Any:
    """What a job gets beyond its place for its wish, in order."""
    plan = planned(**{view_.job: dict(place)}, **{job.job: at for job, at in others})
    problem = Problem(views=[view_, *(job for job, _ in others)], cluster=nodes or cluster(4, 4))
    tenants = [Tenant(name="t", quota={"CPU": quota})]
    found = grant(problem, plan, tenants)
    return dict(found.granted.get(view_.job, {}))


def test_wishes_get_free_slots_on_own_nodes_first() -> None:
    wishes = view("a", wished=5, tenant="t")
    assert granted(wishes, {"n0": 2}) == {"n0": 2, "n1": 1}
    assert granted(wishes, {"n1": 2}) == {"n1": 2, "n0": 1}
    assert granted(wishes, {"n0": 5}) == {}
    assert granted(wishes, {"n0": 2}, (view("b"), {"n0": 2, "n1": 3})) == {"n1": 1}
    assert granted(dataclasses.replace(wishes, held_at=2), {"n0": 2}) == {}
    assert granted(wishes, {"n0": 2}, quota=4.0) == {"n0": 2}
    assert granted(wishes, {"n0": 2}, (view("b", tenant="t"), {"n1": 1}), quota=4.0) == {"n0": 1}
    assert granted(wishes, {"n0": 2}, (view("b", tenant="u"), {"n1": 1}), quota=4.0) == {"n0": 2}
    there = dataclasses.replace(wishes, allocation={"n0": 2, "n1": 1})
    assert granted(dataclasses.replace(there, wished=3), {"n0": 2}) == {"n1": 1}, "what was granted stays where it is"
    assert granted(there, {"n0": 2}) == {"n1": 1, "n0": 2}
    types = Cluster(nodes=tuple(node(f"n{i}", 4, labels={GPU_TYPE_LABEL: f"t{i}"}) for i in range(2)))
    assert granted(wishes, {"n0": 2}, nodes=types) == {"n0": 2}, "not on another type"


def test_wishes_keep_whole_nodes_and_sizes() -> None:
    wishes = view("a", wished=5)
    shy = (view("b", whole_nodes=True), {"n1": 1})
    assert granted(wishes, {"n0": 2}, shy) == {"n0": 2}
    assert granted(dataclasses.replace(wishes, whole_nodes=True), {"n0": 2}, (view("b"), {"n1": 1})) == {"n0": 2}
    assert granted(dataclasses.replace(wishes, sizes=TWOS), {"n0": 2}) == {"n0": 2}, "five is no size of it"
    odd = dataclasses.replace(wishes, sizes=AllowedSizes(sizes=(2, 7)), wished=7)
    assert granted(odd, {"n0": 2}, (view("b"), {"n1": 2})) == {}


@pytest.mark.parametrize(
    ("place", "had", "least", "seen"),
    [
        ({"n0": 4}, {}, 1, {"n0": 4}),
        ({"n0": 4}, {"n0": 1}, 1, {"n0": 3}),
        ({"n0": 4}, {"n0": 4}, 1, {"n0": 1}),  # its minimum stays
        ({"n0": 2, "n1": 2}, {"n1": 2}, 1, {"n0": 2}),
        ({"n0": 2, "n1": 2}, {"n1": 2}, 3, {"n0": 2, "n1": 1}),
        ({"n0": 2}, {"n9": 1}, 1, {"n0": 2}),
        ({"n0": 2}, {"n0": 2}, 5, {"n0": 2}),
    ],
)
def test_a_policy_does_not_see_what_was_granted(
    place: dict[str, int], had: dict[str, int], least: int, seen: dict[str, int]
) -> None:
    found = without_wish(view("a", wished=5, min_workers=least, allocation=place), had)
    assert found.allocation == seen and found.wished is None


@pytest.mark.parametrize(
    ("facts", "concerns"),
    [
        ({}, False),
        ({"priority": 1}, True),
        ({"tenant": "b"}, True),
        ({"preemptible": False}, True),
        ({"deadline_s": 5.0}, True),
        ({"whole_nodes": True}, True),
        ({"spot": "mixed"}, True),
        ({"spot": "avoid"}, False),
        ({"sizes": TWOS}, True),
    ],
)
def test_constraints_concern_jobs_that_differ(facts: dict[str, Any], concerns: bool) -> None:
    assert Constraints().concern([view("a"), view("b", **facts)]) is concerns
    assert not Constraints().concern([])
    assert Constraints(tenants=(Tenant(name="t", quota={"CPU": 1}),)).concern([view("a")])
    assert not Constraints(tenants=(Tenant(name="t", weight=2.0),)).concern([view("a")])


def in_zone(zone: str, slots: int) -> Cluster:
    return Cluster(nodes=(dataclasses.replace(node("n0", slots), labels={"zone": zone}), node("n1", 2 * slots)))


def two(**total: float) -> Cluster:
    """Two nodes: one has only CPUs, the other what is named."""
    return Cluster(nodes=(node("n0", 4), dataclasses.replace(node("n1", 0), total=total)))


NEED = MemoryNeed(available_bytes=50, sharded_bytes=300)  # fits from 12 workers on


@pytest.mark.parametrize(
    ("job", "nodes", "why"),
    [
        (view("a", min_workers=8), cluster(4, 4), ""),
        (view("a", min_workers=8), Cluster(nodes=()), ""),
        (view("a", min_workers=8), Cluster(nodes=(node("n0", 4, free=0.0), node("n1", 4, free=0.0))), ""),
        (view("a", bundle={"CPU": 4.0}), cluster(4, 1), ""),
        (view("a", bundle={"CPU": 1.0, "GPU": 2.0}), two(CPU=1.0, GPU=2.0), ""),
        (view("a", bundle={"CPU": 0.1}, min_workers=40, max_workers=40), cluster(4), ""),
        (
            view("a", min_workers=9, max_workers=9),
            cluster(4, 4),
            "it needs 9 x 1 CPU, but the empty cluster holds 8; .* for example to (8, 9), or add nodes",
        ),
        (
            view("a", min_workers=12, max_workers=12, sizes=AllowedSizes(multiple_of=4)),
            cluster(6, 4),
            "the empty cluster holds 10; lower ScalingConfig(num_workers), for example to (8, 12)",
        ),
        (
            view("a", min_workers=12, max_workers=12, sizes=AllowedSizes(memory=NEED)),
            cluster(6, 4),
            "the empty cluster holds 10; SchedulingConfig(memory=<from 12 on>) allows none so small",
        ),
        (
            view("a", bundle={"CPU": 5.0}),
            cluster(4, 4),
            "one worker needs 5 CPU, but the largest node has 4; change ScalingConfig(.* or add a node with CPU",
        ),
        (
            view("a", bundle={"CPU": 8.0}, unit=4),
            cluster(4),
            "one unit needs 8 CPU, but the largest node has 4; .* a unit is 4 workers",
        ),
        (
            view("a", bundle={"CPU": 4.0}, min_workers=3, max_workers=3, unit=4),
            cluster(4, 4),
            "it needs 3 x 4 CPU, but the empty cluster holds 2; .* for example to (8, 12), or add nodes; a unit is 4",
        ),
        (
            view("a", bundle={"CPU": 8.0}, min_workers=2, max_workers=2, unit=4),
            cluster(4, 4),
            "it needs 2 x 8 CPU, but the empty cluster holds 1; .* for example to (4, 8), or add nodes",
        ),
        (
            view("a", bundle={"CPU": 1.0, "GPU": 2.0}),
            two(CPU=0.0, GPU=2.0),
            "no single node has 1 CPU + 2 GPU together; change ScalingConfig(resources_per_worker)",
        ),
        (
            view("a", label_selector={"zone": "b"}),
            in_zone("a", 4),
            "no node has the labels {'zone': 'b'}, there are zone=a; change ScalingConfig(label_selector)",
        ),
        (view("a", label_selector={"zone": "b"}), cluster(4), "there are none of these keys"),
        (
            view("a", bundle={"CPU": 5.0}, label_selector={"zone": "a"}),
            in_zone("a", 4),
            "but the largest node with the labels {'zone': 'a'} has 4",
        ),
    ],
)
def test_why_a_job_could_never_run(job: JobView, nodes: Cluster, why: str) -> None:
    found = unsatisfiable(job, nodes)
    said = "" if found is None else found.of_unit(job.unit).explained
    assert bool(said) == bool(why) and all(part in said for part in why.split(".*")), said
