"""Rungs get the sizes with which a sweep ends in time at the least cost."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.cluster.jobs import JobView, Progress
from placement.cluster.sizes import AllowedSizes
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.step_time import ThroughputModel
from tuning import Promise, Sweep
from tuning.rung_sizes import Rung, SweepPlanner, rungs_left, size_rungs
from tuning.sweep import this_driver
from tuning.trials import TrialRecord

PROMISE = Promise(metric="accuracy", mode="max", max_t=9, grace_period=1, reduction_factor=3)
# A step of the whole fixed batch of 64 samples takes 64 / k x 1/64 s on k workers, and 0.1 s from two on.
MODEL = GoodputModel(
    ThroughputModel(alpha_c=0.0, beta_c=1 / 64, alpha_n=0.1, beta_n=0.0, alpha_r=0.1, beta_r=0.0, gamma=1.0),
    NoiseScale(sqr=1.0, var=1.0),
    64,
)
ROOM = [4, 4]


def record(trial: str, made: int, *, running: bool = True) -> TrialRecord:
    return TrialRecord(trial=trial, values=(0.5,) * made, running=running)


def view(job: str, **fields: Any) -> JobView:
    known = {"goodput": MODEL, "init_batch_size": 64, "progress": Progress(done=50.0), "max_workers": 4}
    return JobView(job=job, bundle={"CPU": 1}, **{**known, "most_workers": 4, "resize_cost_s": 0.0, **fields})


def test_rungs_say_what_is_left() -> None:
    fresh = rungs_left(PROMISE, 9, ())
    assert [(rung.trials, rung.reports, rung.longest) for rung in fresh] == [(9, 9, 1), (3, 6, 2), (1, 6, 6)]
    some = [record("a", 5), record("b", 2), *(record(f"cut{i}", 1, running=False) for i in range(4)), record("new", 0)]
    left = rungs_left(PROMISE, 9, some)
    assert [(rung.trials, rung.reports, rung.longest) for rung in left] == [(9, 3, 1), (3, 3, 2), (1, 4, 4)]
    over = [record(str(i), 9, running=False) for i in range(9)]
    assert [rung.reports for rung in rungs_left(PROMISE, 9, over)] == [0, 0, 0]
    stopped = [record(str(i), 1, running=False) for i in range(9)]
    assert [rung.reports for rung in rungs_left(PROMISE, 9, stopped)] == [0, 0, 0], "nobody is left to continue"


def spent(rung: Rung, rate: float, w: int, slots: int, at_once: int) -> tuple[float, float]:
    side = max(1, min(rung.trials, at_once, slots // w))
    return max(rung.reports / side, rung.longest) / rate, rung.reports * w / rate


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=3),
    st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(1, 8),
    st.floats(1, 1e4),
    st.booleans(),
)
def test_no_other_sizes_keep_the_limit_for_less(
    shape: list[tuple[int, int]], rates: list[float], slots: int, at_once: int, limit: float, in_time: bool
) -> None:
    rungs = [Rung(trials=n, reports=float(n * each), longest=float(each)) for n, each in shape]
    limits = {"seconds" if in_time else "worker_s": limit}
    found = size_rungs(rungs, np.array(rates), slots=slots, at_once=at_once, **limits)
    every = {}
    for sizes in itertools.product(range(1, min(slots, len(rates)) + 1), repeat=len(rungs)):
        costs = [spent(rung, rates[w - 1], w, slots, at_once) for rung, w in zip(rungs, sizes, strict=True)]
        every[sizes] = sum(t for t, _ in costs), sum(c for _, c in costs)
    assert (found.seconds, found.worker_s) == pytest.approx(every[found.sizes])
    kept, other = (0, 1) if in_time else (1, 0)
    fitting = [each for each in every.values() if each[kept] <= limit * (1 - 1e-9)]
    if fitting:
        assert found.feasible and every[found.sizes][kept] <= limit * (1 + 1e-9)
        assert every[found.sizes][other] <= min(each[other] for each in fitting) * (1 + 1e-9)
    elif min(each[kept] for each in every.values()) > limit * (1 + 1e-9):
        assert not found.feasible
        assert every[found.sizes][kept] == pytest.approx(min(each[kept] for each in every.values()))


def test_a_deadline_is_kept_before_a_budget() -> None:
    rungs, rates = [Rung(trials=1, reports=10.0, longest=10.0)], np.array([1.0, 1.5, 2.0])
    both = size_rungs(rungs, rates, slots=8, at_once=1, seconds=7.0, worker_s=11.0)
    assert (both.sizes, both.feasible) == ((2,), False)
    assert size_rungs(rungs, rates, slots=8, at_once=1, seconds=20.0, worker_s=11.0).sizes == (1,)


def test_sizes_fit_the_cluster() -> None:
    rungs, rates = [Rung(trials=4, reports=4.0, longest=1.0)], np.array([0.0, 1.0, 0.0, 1.9])
    found = {slots: size_rungs(rungs, rates, slots=slots, at_once=4, seconds=0.1).sizes for slots in (1, 3, 16)}
    assert found == {1: (2,), 3: (2,), 16: (4,)}, "on one slot it waits for a node"


def test_no_size_before_a_speed_is_known() -> None:
    planner, room = SweepPlanner(Sweep(deadline_s=100.0), PROMISE, 9, 0.0), {"a": ROOM}
    assert planner.sizes({"a": record("a", 0)}, [view("a")], room, 1.0) == {}
    assert planner.sizes({"a": record("a", 1)}, [view("a", goodput=None)], room, 1.0) == {}
    assert planner.sizes({}, [], {}, 1.0) == {}
    assert planner.sizes({"a": record("a", 1)}, [view("a")], room, 1.0) != {}


def test_sizes_follow_the_deadline() -> None:
    records, room = {"a": record("a", 1), "b": record("b", 0)}, {"a": ROOM, "b": ROOM}
    views = [view("a"), view("b", progress=None, goodput=None)]
    roomy = SweepPlanner(Sweep(deadline_s=1e6, usd_per_worker_h=2.0), PROMISE, 9, 0.0)
    assert roomy.sizes(records, views, room, 10.0) == {"a": 1, "b": 1} and not roomy.note
    tight = SweepPlanner(Sweep(deadline_s=11.0, usd_per_worker_h=2.0), PROMISE, 9, 0.0)
    assert max(tight.sizes(records, views, room, 10.0).values()) > 1
    assert tight.note.startswith("deadline_s=11 cannot be kept: by what its trials have told, the sweep takes ")
    assert " USD from its beginning" in tight.note


def test_a_later_rung_has_a_size_of_its_own() -> None:
    """The last trial alone is too slow on one worker, the first ones are not."""
    planner = SweepPlanner(Sweep(deadline_s=742.0), PROMISE, 9, 0.0)
    records = {**{f"t{i}": record(f"t{i}", 1) for i in range(7)}, "ahead": record("ahead", 3), "new": record("new", 0)}
    views = [view("t0"), view("ahead", progress=Progress(done=150.0)), view("new", progress=None)]
    found = planner.sizes(records, views, {each.job: ROOM for each in views}, 400.0)
    assert found["ahead"] > found["new"] == 1


def test_what_was_spent_counts_against_the_budget() -> None:
    sweep = Sweep(budget_usd=1.0, usd_per_worker_h=3600.0 / 300)  # 300 worker-seconds
    planner, running = SweepPlanner(sweep, PROMISE, 1, 0.0), view("a", allocation={"n": 4})
    room, records = {"a": ROOM}, {"a": record("a", 8)}
    planner.sizes(records, [running], room, 1.0)
    early = planner.note
    planner.sizes(records, [running], room, 80.0)  # 320 worker-seconds are spent
    assert not early and planner.note.startswith("budget_usd=1 cannot be kept")


def test_a_size_is_within_what_the_trial_allows() -> None:
    planner = SweepPlanner(Sweep(deadline_s=1e6), PROMISE, 9, 0.0)
    narrow = view("a", min_workers=2, sizes=AllowedSizes(multiple_of=2))
    assert planner.sizes({"a": record("a", 1)}, [narrow], {"a": ROOM}, 1.0) == {"a": 2}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"deadline_s": 0}, "deadline_s must be above 0 seconds and finite, but got 0"),
        ({"deadline_s": math.inf}, "deadline_s must be"),
        ({"budget_usd": -1, "usd_per_worker_h": 1}, "budget_usd must be above 0 USD and finite, but got -1"),
        ({"budget_usd": 1}, "budget_usd needs usd_per_worker_h, the price of a worker"),
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sweep(**wrong)


@pytest.mark.parametrize(
    ("promise", "trials", "says"),
    [
        (None, 9, r"needs a scheduler with rungs and an end, ASHAScheduler\(max_t=...\)"),
        (Promise(metric="a", mode="max", max_t=None), 9, "needs a scheduler with rungs and an end"),
        (PROMISE, 0, "needs the number of trials, but got a searcher without end"),
        (PROMISE, 2**62, "needs the number of trials"),
    ],
)
def test_limits_need_rungs_and_a_number_of_trials(promise: Promise | None, trials: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        this_driver("/runs", promise, Sweep(deadline_s=10.0), trials)
