"""The goodput policy's arithmetic, worked out by hand: options, what they are worth, who is admitted, who may stay."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.cluster.cluster import GPU_TYPE_LABEL, Cluster, Node
from placement.cluster.jobs import JobView, Progress
from placement.policies import GoodputPolicy
from placement.policies.goodput.local_search import admit_into, present_placements
from placement.policies.goodput.policy import Decided
from placement.policies.goodput.tables import (
    OptionTable,
    Placement,
    SpeedValue,
    build,
    nodes_needed,
    size_grid,
    useful,
    worth_of,
)
from placement.reasons import Cause
from tests.placement.views import cluster, view


@given(st.lists(st.integers(0, 6), max_size=5))
def test_fewest_nodes_are_those_of_any_choice_of_nodes(slots: list[int]) -> None:
    sizes = list(range(1, sum(slots) + 3))
    fewest = [
        min(
            (count for count in range(1, len(slots) + 1) for n in itertools.combinations(slots, count) if sum(n) >= k),
            default=0,
        )
        for k in sizes
    ]
    assert nodes_needed(np.array(slots, dtype=np.int64), np.array(sizes)).tolist() == fewest


@pytest.mark.parametrize(
    ("node", "total", "most", "extra", "sizes", "regular"),
    [
        (4, 12, 12, [5, 99], [1, 2, 3, 4, 5, 6, 7, 8, 12], [1, 2, 4, 5, 8, 12]),
        (1, 3, 9, [], [1, 2, 3], [1, 2, 3]),
        (10, 20, 11, [0, 11], list(range(1, 12)), [1, 2, 4, 8, 10, 11]),
        (0, 0, 4, [], [], []),
        (2, 50, 50, [], [*range(1, 9), *range(10, 33, 2), 38, 44], None),  # by a fifth from 16 nodes on
    ],
)
def test_sizes_of_interest(node: int, total: int, most: int, extra: Any, sizes: Any, regular: Any) -> None:
    grid = size_grid(node, total, most, extra)
    assert grid.sizes.tolist() == sizes
    assert regular is None or grid.sizes[grid.regular].tolist() == regular


@pytest.mark.parametrize(
    ("facts", "most"),
    [
        ({}, 8),
        ({"max_batch_size": 100, "atomic_bsz_range": (30, 64)}, 3),
        ({"max_batch_size": 100, "atomic_bsz_range": (30, 64), "min_workers": 5}, 5),
        ({"max_batch_size": None, "atomic_bsz_range": (16, 64)}, 4),
        ({"max_batch_size": 100, "atomic_bsz_range": (1, 2), "atomic_bsz_ranges": {"v100": (50, 64)}}, 2),
        ({"goodput": None, "max_workers": 99, "most_workers": 3}, 6),
        ({"most_workers": 1}, 8),
        ({"growth_limit": 3}, 3),
        ({"growth_limit": 3, "allocation": {"n0": 5}}, 5),
        ({"max_batch_size": None, "init_batch_size": None, "atomic_bsz_range": None}, 8),
        ({"max_batch_size": 3, "atomic_bsz_range": None}, 3),
    ],
)
def test_most_workers_worth_giving(facts: dict[str, Any], most: int) -> None:
    assert useful(view("a", **facts), "v100") == most


def table(*views: JobView, nodes: Cluster | None = None) -> OptionTable:
    """Options of these jobs on nodes of 2 and 4 CPUs, or others."""
    return build(views, nodes or cluster(2, 4))


def typed(**cpus: float) -> Cluster:
    """One node of each GPU type, named after it."""
    nodes = [
        Node(node_id=gpu, total={"CPU": n}, free={"CPU": n}, labels={GPU_TYPE_LABEL: gpu}) for gpu, n in cpus.items()
    ]
    return Cluster(nodes=tuple(nodes))


def test_options_lie_between_minimum_and_maximum() -> None:
    options = table(view("a", min_workers=2, max_workers=3), view("b", max_workers=9))
    assert options.sizes.tolist() == [1, 2, 3, 4, 5, 6]
    assert options.possible.tolist() == [[False, True, True, False, False, False], [True] * 6]
    assert options.nodes[1].tolist() == [1, 1, 1, 1, 2, 2] and options.capacities.tolist() == [6]


def test_speed_is_relative_to_the_slowest_smallest_size() -> None:
    options = table(view("a", min_workers=2), nodes=typed(a=4, b=2))
    assert options.pool_of.tolist() == [0, 0, 0, 0, 1, 1] and options.sizes.tolist() == [1, 2, 3, 4, 1, 2]
    assert options.speed[0, 1] == options.speed[0, 5] == 1.0 and options.speed[0, 3] > 1.3
    unknown = table(view("a", goodput=None, most_workers=3))
    assert unknown.speed[0].tolist() == [1, 2, 3, 4, 5, 6] and unknown.rate.tolist() == [0]


def test_speed_of_a_place_counts_its_nodes() -> None:
    options = table(view("a"), nodes=cluster(2, 2))
    one, spread = Placement(pool=0, place={0: 2}), Placement(pool=0, place={0: 1, 1: 1})
    listed, other, nowhere = (float(options.speed_at([each])[0]) for each in (one, spread, Placement()))
    assert listed == options.speed[0, 1] and 0 < other < listed and nowhere == 0.0
    assert options.speed_at([Placement(pool=0, place={0: 2, 1: 2})])[0] == options.speed[0, 3]


def test_speed_of_unlisted_sizes_is_their_own() -> None:
    options = table(view("a", max_workers=12), nodes=cluster(*[2] * 6))
    assert options.sizes.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12] and options.nodes[0, -1] == 6
    nine = Placement(pool=0, place={0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1})
    assert options.speed[0, 7] < options.speed_at([nine])[0] < options.speed[0, 8]


def test_kinds_of_workers_take_their_dominant_share() -> None:
    small, large = view("a"), view("b", bundle={"CPU": 2.0})
    options = table(small, large, nodes=cluster(4, 4))
    assert not options.alike and options.capacities.tolist() == [1.0]
    assert options.unit[:, 0].tolist() == [1 / 8, 2 / 8]
    assert options.nodes[:, options.sizes.tolist().index(4)].tolist() == [1, 2]


def value(**facts: Any) -> SpeedValue:
    """What speed is worth to one job of weight 0.4: a change costs 10 s of 100, shrinking a quarter."""
    given = {"weight": [0.4], "left_s": [np.nan], "cost_s": [10.0], "stop_s": [30.0], "horizon_s": [90.0]}
    arrays = {name: np.array(facts.pop(name, default)) for name, default in given.items()}
    return SpeedValue(**arrays, **{"power": 0.5, "hysteresis": 0.25, "charge": 0.5, "crowded": False, **facts})


def worth(utility: SpeedValue, speed: float, fewer: bool = False, same: bool = False) -> float:
    return float(utility.values(np.array([[speed]]), np.array([[fewer]]), np.array([[same]]))[0, 0])


def phi(speed: float) -> float:
    return 2 * (math.sqrt(speed) - 1)


def test_changes_are_charged_for_pauses_and_shrinking() -> None:
    assert worth(value(), 4.0, same=True) == pytest.approx(0.4 * phi(4.0))
    assert worth(value(), 4.0) == pytest.approx(0.4 * phi(4.0) - 0.5 * (phi(4.0) - phi(4.0 * 0.9)))
    assert worth(value(weight=[0.8]), 4.0) == pytest.approx(0.8 * phi(4.0 * 0.9))
    assert worth(value(weight=[0.8]), 4.0, fewer=True) == pytest.approx(0.8 * phi(4.0 * 0.9 / 1.25))
    idle = value(weight=[0.8]).where_gpus_idle()
    assert worth(idle, 4.0) == pytest.approx(0.8 * phi(4.0 * 0.9 / 1.25)) and idle.charge == 0.0
    soon = value(weight=[0.8], left_s=[120.0])
    assert worth(soon, 4.0) == pytest.approx(0.8 * phi(4.0 * 30 / 40)), "it ends in 30 s"
    assert worth(soon, 480.0) == pytest.approx(0.8 * phi(480.0 / 11)), "in which it may train for one second"
    assert worth(value(power=0.0, weight=[1.0]), 4.0, same=True) == pytest.approx(math.log(4.0))


def test_a_stop_costs_the_later_start() -> None:
    crowded, nothing = value(crowded=True), phi(1e-9)
    assert worth(crowded, 0.0, fewer=True) == pytest.approx(0.4 * (nothing + phi(90 / 120 / 1.25)))
    assert worth(crowded, 0.0) == pytest.approx(0.4 * nothing), "one that waits loses nothing by waiting"
    assert worth(crowded, 0.0, fewer=True, same=True) == pytest.approx(0.4 * nothing)
    undone = value(crowded=True, arrivals_per_s=1.0)
    assert worth(undone, 0.0, fewer=True) == pytest.approx(0.4 * (nothing + phi(90 / 150 / 1.25)))
    assert worth(crowded, 4.0, fewer=True) == worth(value(), 4.0, fewer=True), "a job that shrinks goes on"


def test_worth_counts_jobs_that_run_or_may_wait() -> None:
    options = table(view("a"), view("b"), nodes=cluster(4, 4))
    both = value(weight=[0.4, 0.7], left_s=[np.nan] * 2, cost_s=[10.0] * 2, stop_s=[30.0] * 2, horizon_s=[90.0] * 2)
    here = [Placement(pool=0, place={0: 2}), Placement()]
    two = phi(float(options.speed[0, 1]))
    assert worth_of(options, both, here, here, [True] * 2, [False] * 2) == (-0.7, pytest.approx(0.4 * two))
    assert worth_of(options, both, here, here, [False] * 2, [False] * 2) == (-1.1, 0.0)
    waits = worth_of(options, both, here, here, [True] * 2, [False, True])
    assert waits[0] == 0.0 and waits[1] == pytest.approx(0.4 * two + 0.7 * phi(1e-9))
    start = worth_of(options, both, here, [here[0], Placement(pool=0, place={1: 2})], [True] * 2, [False] * 2)
    assert start == (0.0, pytest.approx(1.1 * two)), "a start has no price"
    moved = worth_of(options, both, here, [Placement(pool=0, place={1: 2}), here[1]], [True] * 2, [False] * 2)
    assert moved[1] == pytest.approx(0.4 * two - 0.5 * (two - phi(float(options.speed[0, 1]) * 0.9 / 1.25)))


def present(nodes: Cluster, *views: JobView) -> list[bool]:
    """Which of these jobs may remain as they are."""
    return present_placements(build(views, nodes))[1]


def test_jobs_may_stay_while_nodes_limits_and_users_allow() -> None:
    nodes = cluster(2, 4)
    draining = Cluster(nodes=(nodes.nodes[0], dataclasses.replace(nodes.nodes[1], draining=True)))
    a, b = view("a", allocation={"n1": 2}), view("b", allocation={"n1": 2, "n0": 1})
    assert present(nodes, a, b, view("c")) == [True, True, False]
    assert present(nodes, a, b, view("c", allocation={"n1": 1})) == [True, True, False], "who came first stays"
    assert present(nodes, a, dataclasses.replace(b, min_workers=3, max_workers=3)) == [True, True]
    assert present(nodes, dataclasses.replace(b, min_workers=4)) == [False]
    assert present(nodes, dataclasses.replace(b, max_workers=2)) == [False]
    for held, stays in ((2, False), (3, True), (4, True)):
        assert present(nodes, dataclasses.replace(b, held_at=held)) == [stays]
    placements, valid = present_placements(build([a, b], draining))
    assert [each.place for each in placements] == [{}, {0: 1}] and valid == [False, True]
    assert present(typed(x=4, y=4), view("a", allocation={"x": 1, "y": 1})) == [False]
    assert present(nodes, view("big", bundle={"CPU": 2.0}, allocation={"n1": 2}), a) == [True, False]


def admitted(nodes: Cluster, *views: JobView) -> dict[int, tuple[int, int]]:
    """Pool and workers of each job that is admitted."""
    options = build(views, nodes)
    return admit_into(options, range(len(views)), present_placements(options)[0])[0]


def test_minimums_come_in_order_and_smaller_jobs_may_pass() -> None:
    nodes = cluster(2, 4)
    four, three, small = view("a", min_workers=4), view("b", min_workers=3), view("c")
    assert admitted(nodes, four, three, small, small) == {0: (0, 4), 2: (0, 1), 3: (0, 1)}
    assert admitted(nodes, three, three, small) == {0: (0, 3), 1: (0, 3)}
    wide = view("w", bundle={"CPU": 2.0}, min_workers=2)
    assert admitted(nodes, view("a"), wide, wide) == {0: (0, 1), 1: (0, 2)}, "one CPU of the first node is left over"


def test_held_jobs_get_what_is_left_after_all_minimums() -> None:
    nodes = cluster(2, 4)
    held = view("a", held_at=5)
    assert admitted(nodes, held) == {0: (0, 5)}
    assert admitted(nodes, held, view("b", min_workers=2)) == {0: (0, 4), 1: (0, 2)}
    assert admitted(nodes, held, held) == {0: (0, 5), 1: (0, 1)}
    assert admitted(nodes, dataclasses.replace(held, held_at=1)) == {0: (0, 1)}


def test_minimums_stay_on_their_type_else_take_the_emptiest() -> None:
    nodes = typed(x=3, y=4)
    assert admitted(nodes, view("a")) == {0: (1, 1)}
    assert admitted(nodes, view("a", allocation={"x": 1})) == {0: (0, 1)}
    assert admitted(typed(x=4, y=4), view("a")) == {0: (0, 1)}
    assert admitted(nodes, view("a", min_workers=4, allocation={"x": 3})) == {0: (1, 4)}


def utility(*views: JobView, slots: float = 16, now_s: float = 0.0, **settings: Any) -> SpeedValue:
    policy = GoodputPolicy(**settings)
    return policy.utility(build(views, cluster(*[4.0] * int(slots // 4))), now_s)


def lasts(epochs: float) -> Progress:
    return Progress(done=10.0, epoch_ends=(10.0,), epochs=epochs)


def test_phi_is_the_flatter_the_fuller_the_cluster() -> None:
    known = [view(f"j{i}", progress=lasts(5)) for i in range(8)]
    powers = [utility(*known[:n]).power for n in (1, 2, 3, 4, 6, 8)]
    assert powers == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.75, 1.0])
    assert utility(*known, slots=16).crowded and not utility(*known[:4]).crowded
    assert utility(view("a"), view("b")).power == 0.0
    half = utility(*known[:2], *(view(f"u{i}", progress=Progress(done=3.0)) for i in range(2)), fair_power=0.1)
    assert half.power == pytest.approx(0.3), "half of the lengths are guessed"


def test_unknown_lengths_count_as_the_mean_of_known_ones() -> None:
    new, ran = view("n"), view("u", progress=Progress(done=3.0))
    value_ = utility(view("a", progress=lasts(3)), view("b", progress=lasts(5)), new, ran)
    assert value_.left_s[2] == value_.left_s[3] == pytest.approx(value_.left_s[:2].mean())
    assert value_.left_s[1] == pytest.approx(2 * value_.left_s[0])
    assert np.isnan(utility(view("a", progress=lasts(3)), lengths=False).left_s).all()


def test_time_that_a_size_lasts_is_the_least_horizon() -> None:
    old = view("a", submitted_s=100.0, restarts=3, resize_cost_s=7.0)
    assert utility(old, now_s=2100.0).horizon_s.tolist() == [500.0] and utility(old).cost_s.tolist() == [7.0]
    assert utility(old, now_s=1300.0).horizon_s.tolist() == [300.0]
    assert utility(old, now_s=0.0, horizon_s=1.0).horizon_s.tolist() == [1.0]


def test_the_charge_follows_the_largest_weight() -> None:
    assert utility(view("a", weight=3.0), view("b", weight=0.5)).charge == 1.5
    assert utility(view("a", weight=3.0), view("b", weight=0.5)).weight.tolist() == pytest.approx([2.25, 0.375])


def decided(
    *changes: tuple[JobView, dict[int, int], dict[int, int]], left_s: Any = None, cpus: tuple[int, ...] = (4, 4)
) -> Decided:
    """A decision that took each job from one place to another; its workers before are those of the first place."""
    views = [view_.placed({f"n{i}": n for i, n in was.items()}) for view_, was, _ in changes]
    before, after = (
        [Placement(pool=0 if at else -1, place=at) for at in places]
        for places in zip(*[c[1:] for c in changes], strict=True)
    )
    count = len(changes)
    utility_ = value(
        weight=[0.4] * count, left_s=left_s or [np.nan] * count, cost_s=[1.0] * count, horizon_s=[9.0] * count
    )
    return Decided(instance=build(views, cluster(*cpus)), utility=utility_, before=before, after=after)


A, B = view("a"), view("b")


@pytest.mark.parametrize(
    ("changes", "left_s", "cause", "facts"),
    [
        ([(A, {}, {0: 2})], None, Cause.STARTS, ("2 workers", "by measured speeds")),
        ([(view("a", goodput=None), {}, {0: 1})], None, Cause.STARTS, ("1 worker", "no model yet")),
        ([(view("a", goodput=None), {0: 1}, {0: 2})], None, Cause.EXPLORES, ("2 workers",)),
        ([(A, {0: 2}, {0: 2})], None, Cause.NOT_WORTH, ("2 workers",)),
        ([(A, {0: 4, 1: 4}, {0: 4, 1: 4})], None, Cause.MOST, ("8 workers",)),
        ([(A, {0: 4}, {0: 4}), (B, {1: 4}, {1: 4})], None, Cause.FULL, ("4 workers",)),
        ([(A, {0: 4}, {0: 4}), (B, {1: 3}, {1: 3})], None, Cause.NOT_WORTH, ("4 workers",)),
        ([(A, {}, {}), (B, {0: 4, 1: 4}, {0: 4, 1: 4})], None, Cause.FULL, ("waits",)),
        ([(A, {}, {}), (B, {0: 4, 1: 4}, {0: 4, 1: 4})], [9.0, 8.0], Cause.SHORTER, ("1 job", "9s")),
        ([(A, {}, {}), (B, {0: 4, 1: 4}, {0: 4, 1: 4})], [8.0, 8.0], Cause.FULL, ("waits",)),
        ([(A, {0: 2}, {0: 1}), (B, {1: 1}, {1: 1})], [9.0, 9.0], Cause.FEWER, None),
        ([(A, {0: 2}, {0: 1}), (B, {}, {1: 3})], None, Cause.TAKEN, ("job b", "3 workers", "to start with")),
        ([(A, {0: 4}, {0: 1}), (B, {1: 1}, {1: 3}), (view("c"), {}, {0: 2})], None, Cause.TAKEN, None),
        (
            [(A, {0: 4}, {0: 1}), (B, {1: 1}, {1: 3}), (view("c"), {}, {0: 2})],
            [9.0, 1.0, 2.0],
            Cause.SHORTER,
            ("2 jobs", "9s"),
        ),
        ([(A, {0: 4}, {0: 1}), (B, {1: 1}, {1: 3}), (view("c"), {}, {0: 2})], [9.0, 1.0, 10.0], Cause.TAKEN, None),
    ],
)
def test_reasons_by_who_gains_and_who_is_shorter(changes: Any, left_s: Any, cause: Cause, facts: Any) -> None:
    reason = decided(*changes, left_s=left_s).reason(0)
    assert reason.cause is cause
    assert facts is None or tuple(map(str, reason.facts)) == facts


def test_reasons_tell_gains_and_costs() -> None:
    case = decided((view("a", resize_cost_s=7.0), {0: 1}, {0: 2}), (B, {0: 1}, {1: 1}), (view("c"), {1: 4}, {1: 1}))
    speed = case.instance.speed
    grows, moves, loses = (case.reason(j) for j in range(3))
    assert (grows.cause, grows.facts) == (Cause.GROWTH, (pytest.approx(speed[0, 1] / speed[0, 0]), 7.0))
    assert moves.cause is Cause.MOVES and moves.facts[0] == 1.0
    assert loses.cause is Cause.TAKEN and loses.facts[:2] == ("job a", "1 worker")
    assert f"for {speed[0, 1]:.3g} x the speed" in str(loses.facts[2])
    added = speed[0, 2] - speed[0, 1]
    assert grows.figures == (
        f"1 -> 2 workers, speed 1.00 -> {speed[0, 1]:.2f}; one more would add {added:.2f}; "
        "speeds are fitted and measured; its weight is 0.40, a resize costs 7 s"
    )
    assert f"a 1 -> 2, speed 1.00 -> {speed[0, 1]:.2f}" in loses.figures and "b 1" not in loses.figures
    later = decided((A, {0: 4}, {0: 2}), (B, {1: 2}, {1: 4})).reason(0)
    assert f"for {speed[0, 3] / speed[0, 1]:.3g} x the speed" in str(later.facts[2])
