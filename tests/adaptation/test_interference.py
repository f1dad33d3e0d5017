"""Another strategy when others use the network, on runs by script."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from elastic_ray.adaptation import Interference, PolicyView, SetStrategy
from elastic_ray.adaptation.policies.interference import sent_between_nodes
from elastic_ray.monitoring.measures import WorkerMeasures
from elastic_ray.sync.operations.topologies import SCHEDULES
from tests.adaptation.scripted import ScriptedRun, listed

START = PolicyView(workers=4, batch_size=64, strategies=("all_reduce",))


class Link:
    """Step times of each strategy, with the link free and shared."""

    def __init__(self, **times: tuple[float, float]) -> None:
        self.times, self.shared = times, False

    def step_s(self, view: PolicyView) -> float:
        return self.times[view.strategies[0]][self.shared]


def scripted(link: Link, *strategies: str) -> ScriptedRun:
    return ScriptedRun(policy=Interference(strategies), view=START, step_s=link.step_s)


def test_it_is_noticed_within_ten_steps_and_fastest_stays() -> None:
    link = Link(all_reduce=(0.1, 0.3), bf16=(0.11, 0.2), powersgd=(0.15, 0.16))
    script = scripted(link, "all_reduce", "bf16", "powersgd")
    assert script.steps(50) == []
    link.shared, since = True, script.view.step
    script.steps(60)
    assert [request for _, request in script.asked] == [SetStrategy("bf16"), SetStrategy("powersgd")]
    assert script.asked[0][0] - since <= 10
    assert script.view.strategies == ("powersgd",)


TOPOLOGIES = ("all_reduce", "star", "tree", "ring", "two_level")
TWO_NODES = dataclasses.replace(START, nodes=2)


def on_slow_link(
    link: Link, *, choices: Sequence[str] = TOPOLOGIES, steps: int = 60, view: PolicyView = TWO_NODES
) -> ScriptedRun:
    """A run whose link slows after 30 steps."""
    script = ScriptedRun(policy=Interference(choices), view=view, step_s=link.step_s)
    script.steps(30)
    link.shared = True
    script.steps(steps)
    return script


def chosen(script: ScriptedRun) -> list[str]:
    return [request.strategy for _, request in script.asked if isinstance(request, SetStrategy)]


@pytest.mark.parametrize("choices", [TOPOLOGIES, TOPOLOGIES[1:]])
def test_topology_that_sends_least_is_tried_first_and_kept(choices: Sequence[str]) -> None:
    link = Link(all_reduce=(0.1, 0.7), two_level=(0.1, 0.54), ring=(0.1, 0.8), tree=(0.1, 0.9), star=(0.1, 1.6))
    script = on_slow_link(link, choices=choices)
    assert chosen(script) == ["two_level"]
    slow = [end - start for start, end in itertools.pairwise(script.ends_s)][29:]
    assert max(slow[10:]) <= 0.54 + 1e-9, "within ten steps"


def test_others_are_tried_where_least_sent_gains_little() -> None:
    # Two thirds of the bytes should take 0.47 s: not even half of that gain is there.
    link = Link(all_reduce=(0.1, 0.7), two_level=(0.1, 0.6), ring=(0.1, 0.3), tree=(0.1, 0.9), star=(0.1, 1.6))
    script = on_slow_link(link)
    assert chosen(script) == ["two_level", "ring", "tree", "star", "ring"]
    assert script.view.strategies == ("ring",)


@pytest.mark.parametrize("two_level_s", [0.8, 0.5])
def test_a_loser_runs_for_two_measured_steps(two_level_s: float) -> None:
    link = Link(all_reduce=(0.1, 0.7), two_level=(0.1, two_level_s), bf16=(0.1, 0.9), powersgd=(0.1, 0.4))
    policy = Interference(["powersgd", "bf16", "two_level"])
    script = ScriptedRun(policy=policy, view=TWO_NODES, step_s=link.step_s)
    script.steps(30)
    link.shared = True
    script.steps(60)
    assert chosen(script) == ["two_level", "powersgd", "bf16", "powersgd"], "topologies first, others in their order"
    steps = [step for step, _ in script.asked]
    assert [b - a for a, b in itertools.pairwise(steps)] == [3 + (2 if two_level_s > 0.7 else 5), 3 + 5, 3 + 2]


def test_on_one_node_topologies_keep_their_order() -> None:
    link = Link(all_reduce=(0.1, 0.7), star=(0.1, 0.6), tree=(0.1, 0.5), ring=(0.1, 0.4), two_level=(0.1, 0.3))
    assert chosen(on_slow_link(link, view=START)) == list(TOPOLOGIES[1:])


@pytest.mark.parametrize(("workers", "nodes"), [(4, 2), (8, 2), (6, 3), (16, 4)])
def test_sent_times_are_those_of_the_schedules(workers: int, nodes: int) -> None:
    places, size = [rank * nodes // workers for rank in range(workers)], 5040

    def busy(rounds: list[Any]) -> float:
        total = 0.0
        for each in rounds:
            loads = collections.Counter[tuple[str, int]]()
            for (source, destination), (first, last) in each.transfers.items():
                if places[source] != places[destination]:
                    loads["out", places[source]] += last - first
                    loads["in", places[destination]] += last - first
            total += max(loads.values(), default=0) / size
        return total

    for name, schedule in SCHEDULES.items():
        assert sent_between_nodes(name, workers, nodes) == pytest.approx(busy(schedule(places, size)), rel=0.01), name


def test_present_one_stays_if_fastest_and_is_not_doubted() -> None:
    link = Link(all_reduce=(0.1, 0.2), bf16=(0.3, 0.4))
    script = scripted(link, "bf16")
    script.steps(50)
    link.shared = True
    script.steps(200)
    assert [request for _, request in script.asked] == [SetStrategy("bf16"), SetStrategy("all_reduce")]


def test_a_refused_strategy_is_measured_as_what_it_is() -> None:
    link = Link(all_reduce=(0.1, 0.2), powersgd=(0.1, 0.2))
    script = scripted(link, "powersgd")
    script.steps(20)
    link.shared = True
    for _ in range(60):
        script.step(strategies=("all_reduce",))
    assert len(script.asked) <= 2


def judged(policy: Interference, rows: list[list[tuple[float, float]]]) -> list[Any]:
    """What it asks for over steps of which each worker's time and computation are given."""
    found = []
    for row in rows:
        measures = tuple(WorkerMeasures(step_s=step_s, compute_s=compute_s) for step_s, compute_s in row)
        found += listed(policy.after_step(dataclasses.replace(START, worker_measures=measures)))
    return found


FREE = [[(0.1, 0.05)] * 4] * 10


@pytest.mark.parametrize(
    ("slow", "asks"),
    [
        ([(0.2, 0.05)] * 4, True),
        ([(0.2, 0.05)] * 3 + [(0.1, 0.05)], True),
        ([(0.2, 0.05)] * 2 + [(0.1, 0.05)] * 2, False),  # no majority
        ([(0.12, 0.05)] * 4, False),  # 0.83 of the best
        ([(0.13, 0.05)] * 4, True),
        ([(0.2, 0.05)] * 3 + [(0.2, 0.15)], False),  # one computes for longer, and the others wait for it
    ],
)
def test_most_workers_must_be_slow_and_not_by_computing(slow: list[tuple[float, float]], asks: bool) -> None:
    assert bool(judged(Interference(), [*FREE, *[slow] * 10])) is asks


@pytest.mark.parametrize(("busy", "asks"), [(0.10, True), (0.099, True), (0.101, False)])
def test_half_of_the_difference_may_be_computation(busy: float, asks: bool) -> None:
    assert bool(judged(Interference(), [*[[(0.1, 0.05)] * 4] * 6, *[[(0.2, busy)] * 4] * 6])) is asks


def test_a_time_is_the_median_of_the_window() -> None:
    slow = [(0.3, 0.05)] * 4
    assert not judged(Interference(window=5), [*FREE, slow, slow])
    assert judged(Interference(window=5), [*FREE, slow, slow, slow]) == [SetStrategy("bf16")]
    assert judged(Interference(window=1), [*FREE, slow]) == [SetStrategy("bf16")]
    assert not judged(Interference(window=1), [slow, slow]), "its own best is no slower"


def test_strategy_is_that_of_the_named_model() -> None:
    second = dataclasses.replace(START, strategies=("bf16", "all_reduce"))
    link = Link(all_reduce=(0.1, 0.3))
    policy = Interference(["bf16"], model=1, window=1)
    script = ScriptedRun(policy=policy, view=second, step_s=lambda view: link.times["all_reduce"][link.shared])
    script.steps(10)
    link.shared = True
    assert script.steps(2) == [SetStrategy("bf16", model=1)]
    alone = ScriptedRun(policy=Interference(model=1, window=1), view=START, step_s=link.step_s)
    link.shared = False
    alone.steps(10)
    link.shared = True
    assert alone.steps(10) == [], "there is no second model"


def test_steps_without_a_time_do_not_count() -> None:
    policy = Interference(window=2)
    assert not judged(policy, [[(0.1, 0.05)] * 3 + [(0.0, 0.0)]] * 10) and policy.best == {}
    judged(policy, [[(0.1, 0.05)] * 4])
    assert policy.best == {}
    judged(policy, [[(0.1, 0.05)] * 4])
    assert list(policy.best.values()) == [[0.1, 0.05]]


def test_each_trial_begins_after_the_switch_has_counted() -> None:
    link = Link(all_reduce=(0.1, 0.3), bf16=(0.1, 0.2), powersgd=(0.1, 0.1))
    script = ScriptedRun(policy=Interference(["bf16", "powersgd"], window=2, rest=9), view=START, step_s=link.step_s)
    script.steps(10)
    link.shared = True
    script.steps(30)
    (first, _), (second, _) = script.asked
    assert second - first == 3 + 2, "three steps of the switch, and the window"


def test_after_a_trial_it_rests() -> None:
    link = Link(all_reduce=(0.1, 0.3), bf16=(0.1, 0.1))
    script = ScriptedRun(policy=Interference(["all_reduce", "bf16"], rest=30), view=START, step_s=link.step_s)
    script.steps(20)
    link.shared = True
    script.steps(30)
    link.times["bf16"], link.times["all_reduce"] = (0.3, 0.3), (0.1, 0.1)
    script.steps(60)
    first, second = (step for step, _ in script.asked)
    assert 30 <= second - first <= 55
    assert script.view.strategies == ("all_reduce",)


def test_a_slow_step_or_two_are_nothing() -> None:
    assert not judged(Interference(), [*FREE, *[[(0.9, 0.05)] * 4] * 2, *FREE])


def test_another_size_or_batch_has_its_own_best() -> None:
    link = Link(all_reduce=(0.1, 0.3), bf16=(0.1, 0.1))
    script = scripted(link, "bf16")
    script.steps(20)
    link.shared = True
    script.steps(20, batch_size=256)
    assert script.asked == []


def test_a_trial_ends_with_the_group() -> None:
    link = Link(all_reduce=(0.1, 0.3), bf16=(0.1, 0.4))
    script = scripted(link, "bf16", "powersgd")
    script.steps(20)
    link.shared = True
    while not script.asked:
        script.step()
    script.steps(3)
    asked = len(script.asked)
    script.step(generation=7)
    script.steps(30)
    assert len(script.asked) == asked, "what is measured in another group is no part of the trial"


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Interference("bf16"), TypeError, r"Interference\(strategies\) must be a list of names"),
        (lambda: Interference([]), TypeError, r"\(strategies\) must be a list of names"),
        (lambda: Interference(["fp4"]), ValueError, r"\(strategies\) must be one of all_reduce, .*but got 'fp4'"),
        (lambda: Interference(threshold=1.0), ValueError, r"\(threshold\) must be above 0 and below 1"),
        (lambda: Interference(window=0), ValueError, r"\(window\) must be a whole number, 1 or more"),
    ],
)
def test_arguments_are_checked_by_name(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()
