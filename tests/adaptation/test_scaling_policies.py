"""Or et al.'s rules: which size their search ends at, on jobs whose step time is a made function of the workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ray.adaptation import PolicyView, Resize, ThroughputScaling, UtilityCost
from elastic_ray.adaptation.policies.scaling import SizeSearch, parse_utility
from placement.cluster.utility import scaling_efficiency
from tests.adaptation.scripted import ScriptedRun

SMALL: dict[str, int] = {"every": 10, "stride": 1, "steps_to_stay": 10}


def run(policy: Any, step_s: Callable[[int], float], start: int = 1, most: int = 8, **options: Any) -> ScriptedRun:
    view = PolicyView(workers=start, batch_size=64, min_workers=1, max_workers=most, epochs=1)
    return ScriptedRun(policy=policy, view=view, step_s=lambda view: step_s(view.workers), **options)


def amdahl(workers: int) -> float:
    """A step that a tenth of does not divide, and that each worker lengthens a little."""
    return 0.1 + 0.9 / workers + 0.02 * workers


def sizes(script: ScriptedRun) -> list[int]:
    return [request.to for _, request in script.asked if isinstance(request, Resize) and request.to]


def test_the_published_example_of_scaling_efficiency() -> None:
    assert scaling_efficiency(4, 400.0, 5, 480.0) == pytest.approx(0.8)
    assert scaling_efficiency(2, 100.0, 4, 200.0) == 1.0
    assert scaling_efficiency(2, 100.0, 4, 100.0) == 0.0
    assert scaling_efficiency(2, 100.0, 4, 90.0) < 0


def search(measured: dict[int, int], good: int, **options: int) -> int:
    """The next size where it pays to grow up to ``good``."""
    chosen = {"fewest": 4, "most": 32, "stride": 4, "passes_to_stay": 3, "steps_to_stay": 100, **options}
    return SizeSearch(**chosen).next_size(measured, lambda old, new: new <= good)


@pytest.mark.parametrize(
    ("measured", "good", "options", "expected"),
    [
        ({8: 1}, 32, {}, 12),
        ({32: 1}, 32, {}, 28),
        ({30: 1}, 32, {}, 32),
        ({8: 1, 12: 1}, 32, {}, 16),
        ({8: 1, 12: 1}, 8, {}, 4),  # fewer than three passes: smaller sizes first
        ({4: 9, 8: 9, 12: 99}, 8, {}, 12),  # not measured for long enough
        ({4: 9, 8: 9, 12: 100}, 8, {}, 8),
        ({4: 9, 8: 9, 12: 9, 16: 9, 20: 100}, 16, {"fewest": 1}, 16),  # three passes: smaller ones stay untried
        ({28: 9, 32: 9}, 32, {}, 24),
        ({20: 9, 24: 9, 28: 9, 32: 9}, 32, {}, 32),
        ({4: 9, 8: 100}, 1, {"most": 8}, 4),
        ({2: 100}, 9, {"fewest": 2, "most": 2}, 2),
    ],
)
def test_the_search_step_by_step(measured: dict[int, int], good: int, options: dict[str, int], expected: int) -> None:
    assert search(measured, good, **options) == expected


@given(
    st.dictionaries(st.integers(2, 20), st.integers(1, 200), min_size=1, max_size=8),
    st.integers(1, 25),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_the_search_stays_within_the_limits(measured: dict[int, int], good: int, stride: int, passes: int) -> None:
    assert 2 <= search(measured, good, fewest=2, most=20, stride=stride, passes_to_stay=passes) <= 20


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3))
def test_from_everywhere_it_ends_at_the_largest_paying_size(start: int, good: int, stride: int) -> None:
    """On a job that gains up to ``good`` workers and nothing beyond."""

    def step_s(workers: int) -> float:
        return 1.0 / min(workers, good)

    policy = ThroughputScaling(every=3, stride=stride, steps_to_stay=3)
    script = run(policy, step_s, start=start, most=12)
    script.steps(400)
    end = script.view.workers
    tried = sorted(policy.rates)
    assert script.steps(100) == [], "it has come to rest"
    assert end >= min(good, 12) - stride or end in (min(tried), 12)
    before = max((size for size in tried if size < end), default=None)
    assert before is None or step_s(end) < step_s(before), "the last worker pays"


def test_it_ends_at_the_size_that_a_sweep_finds() -> None:
    threshold = 0.1
    rates = {size: 64 / amdahl(size) for size in range(1, 9)}
    swept = next(
        (old for old, new in itertools.pairwise(rates) if scaling_efficiency(old, rates[old], new, rates[new]) <= 0.1),
        8,
    )
    for start in (1, 3, 8):
        script = run(ThroughputScaling(threshold=threshold, **SMALL), amdahl, start=start)
        script.steps(400)
        assert script.view.workers == swept, start


def test_each_size_is_asked_for_once_after_its_steps() -> None:
    script = run(ThroughputScaling(**SMALL), amdahl)
    script.steps(300)
    assert sizes(script) == [2, 3, 4, 5, 6, 7, 6]
    steps = [step for step, _ in script.asked]
    assert steps[0] == 12, "the first two steps of a group have no time"
    assert {later - sooner for sooner, later in itertools.pairwise(steps)} == {13}


def test_size_that_is_not_granted_is_out_of_reach() -> None:
    script = run(ThroughputScaling(**SMALL), lambda workers: 1.0 / workers, grants=lambda wish: min(wish, 3))
    script.steps(600)
    assert script.view.workers == 3
    assert sizes(script) == [2, 3, 4, 3], "it takes the wish back"


def test_a_wish_may_come_for_ten_periods() -> None:
    policy = ThroughputScaling(every=2, stride=1, steps_to_stay=1, passes_to_stay=1)
    view = PolicyView(workers=2, batch_size=64, min_workers=1, max_workers=8, step_s=1.0)
    answers = [policy.after_step(view) for _ in range(40)]
    assert answers[1] == Resize(to=3) and answers[19] == Resize(to=1), "2 are the most that can be had"
    assert [each for each in answers if each is not None] == [Resize(to=3), Resize(to=1)]


def test_a_size_that_comes_back_is_in_reach_again() -> None:
    policy = ThroughputScaling(**SMALL)
    script = run(policy, lambda workers: 1.0 / workers, most=6)
    script.steps(200)
    assert script.view.workers == 6
    script.steps(150, workers=4, generation=50)
    assert policy.granted == 4 and sizes(script)[-1] == 6
    script.steps(15, workers=6, generation=51, max_workers=8)
    assert policy.granted is None and sizes(script)[-1] == 7


def test_rates_are_means_over_measured_steps_of_a_size() -> None:
    policy = ThroughputScaling(every=100)
    for workers, step_s in ((2, 1.0), (2, 0.5), (4, 0.25), (2, 0.0), (2, 2.0)):
        policy.after_step(PolicyView(workers=workers, batch_size=8, min_workers=1, max_workers=8, step_s=step_s))
    assert policy.counts == {2: 3, 4: 1}
    assert policy.rates == pytest.approx({2: (8 + 16 + 4) / 3, 4: 32.0})


@pytest.mark.parametrize(("more", "pays"), [(0.9, False), (1.0, False), (1.1, True)])
def test_growth_pays_above_the_threshold_alone(more: float, pays: bool) -> None:
    policy = ThroughputScaling(threshold=0.5)
    policy.rates = {2: 100.0, 4: 100.0 + 50.0 * more}
    assert policy.passes(2, 4, PolicyView()) is pays


def test_a_group_that_cannot_change_is_left_alone() -> None:
    view = PolicyView(workers=2, batch_size=64)
    script = ScriptedRun(policy=ThroughputScaling(**SMALL), view=view, step_s=lambda view: 0.1)
    assert script.steps(100) == []


@pytest.mark.parametrize(
    ("text", "time_s", "value"),
    [
        ("10,3600", 0, 10),
        ("10,3600", 1800, 5),
        ("10,3600", 7200, -10),
        ("50:100,0:300", 50, 50),
        ("50:100,0:300", 200, 25),
        ("50:100,0:300", 400, -25),
        ("50:0,20:100,0:300", 50, 35),
    ],
)
def test_utilities_as_text(text: str, time_s: float, value: float) -> None:
    assert float(parse_utility(text).at(np.array(time_s))) == pytest.approx(value)


@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=5, unique=True),
    st.lists(st.integers(1, 10_000), min_size=2, max_size=5, unique=True),
    st.floats(0, 20_000),
    st.floats(0, 20_000),
)
def test_being_done_later_is_never_worth_more(values: list[int], times: list[int], a: float, b: float) -> None:
    pairs = zip(sorted(values, reverse=True), sorted(times), strict=False)
    points = parse_utility(",".join(f"{value}:{time_s}" for value, time_s in pairs))
    early, late = points.at(np.array([min(a, b), max(a, b)]))
    assert early >= late - 1e-6


@pytest.mark.parametrize("text", ["", "10", "10,0", "0,10", "5:10", "1:10,2:20", "2:10,1:10", "3:10,3:20", "a,b"])
def test_another_utility_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as '50:3600,0:7200'"):
        parse_utility(text)


def costed(utility: str, price: float) -> int:
    """The size at which a run of 10 000 steps ends up, 102 s long with one worker and 59 s with two."""
    policy = UtilityCost(utility, price_per_worker_hour=price, **SMALL)
    script = run(policy, lambda workers: 0.01 * amdahl(workers))
    while script.view.step < 400:
        script.step(epoch_progress=(script.view.step + 1) / 10_000)
    return script.view.workers


def test_dear_workers_are_few_and_worthless_hurry_buys_none() -> None:
    dear, cheap = costed("100,200", price=3 * 3600.0), costed("100,200", price=1.0)
    assert dear == 1 < cheap
    assert costed("0.000001,1000000", price=100.0) == 1


def test_growth_pays_exactly_when_utility_gains_more_than_cost() -> None:
    policy = UtilityCost("100,1000", price_per_worker_hour=3600.0)
    policy.rates = {1: 1.0, 2: 1.5}
    view = PolicyView(samples=100, epochs=1, epoch_progress=0.5, elapsed_s=10.0)
    # 100 samples left: 100 s or 66.7 s; 100 USD or 133.3 USD. 33.3 s sooner are worth 3.33 USD.
    assert not policy.passes(1, 2, view)
    policy.price = 3.3 / 33.34
    assert policy.passes(1, 2, view)
    assert not policy.passes(1, 2, PolicyView(samples=100)), "no declared epochs"


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda: ThroughputScaling(every=0),
            ValueError,
            r"ThroughputScaling\(every\) must be a whole number, 1 or more, but got 0",
        ),
        (
            lambda: ThroughputScaling(stride=True),
            TypeError,
            r"\(stride\) must be a whole number, 1 or more, but got True",
        ),
        (lambda: ThroughputScaling(threshold="0.1"), TypeError, r"\(threshold\) must be a number"),
        (lambda: UtilityCost(10), TypeError, "utility must be pairs"),
        (lambda: UtilityCost("1,2", price_per_worker_hour=-1), ValueError, r"\(price_per_worker_hour\).*0 or more"),
    ],
)
def test_arguments_are_checked_by_name(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()
