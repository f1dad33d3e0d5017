"""When a batch may grow, and when it goes back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.batch.growth import (
    LARGE_GROWTH,
    PAUSE_STEPS,
    QUIET_STEPS,
    QUIET_UPDATES,
    RISE,
    RISE_UPDATES,
    GrowthWatch,
    StepBack,
)
from elastic_ray.batch.reports import NoiseSignal

INITIAL, SPACING = 64, 8  # one estimate in so many steps


class Run:
    """A run whose gradients are told to the watch, one estimate in ``SPACING`` steps."""

    def __init__(self) -> None:
        self.watch = GrowthWatch(INITIAL)
        self.steps = self.updates = 0
        self.backs: list[StepBack] = []

    def go(self, batch_size: int, reports: int, *, present: bool = True, size: float = 1.0) -> list[StepBack]:
        """Report so often; returns the steps back that were asked for."""
        found = []
        for _ in range(reports):
            self.steps += SPACING
            self.updates += 1
            signal = NoiseSignal(present=present, size=size, updates=self.updates)
            self.watch.observe(batch_size=batch_size, steps=self.steps, signal=signal)
            if (back := self.watch.step_back()) is not None:
                found.append(back)
        self.backs += found
        return found


def test_before_a_signal_nothing_hinders_and_nothing_goes_back() -> None:
    watch = GrowthWatch(INITIAL)
    for step in range(0, 1000, 10):
        watch.observe(batch_size=256, steps=step, signal=None)
        assert watch.step_back() is None
    assert (watch.growth, watch.hindrance) == (LARGE_GROWTH, "")


def test_without_a_signal_a_batch_stays_and_says_so() -> None:
    run = Run()
    run.go(INITIAL, 3, present=False)
    assert run.watch.growth == 1.0
    assert run.watch.hindrance == (
        "no signal: after 3 estimates the squared norm of the mean gradient does not stand out of their scatter"
    )
    run.go(INITIAL, 1)
    assert (run.watch.growth, run.watch.hindrance) == (LARGE_GROWTH, "")


def test_without_a_signal_for_long_a_batch_falls_stepwise() -> None:
    run = Run()
    run.go(256, 3)
    needed = max(-(-QUIET_STEPS // SPACING), QUIET_UPDATES)
    assert run.go(256, needed - 1, present=False) == []
    [back] = run.go(256, 1, present=False)
    assert (back.batch_size, back.reason) == (128, f"batch 256 -> 128: no signal in {needed * SPACING} steps")
    assert run.go(128, needed, present=False) == [], "it counts anew at each batch"
    [back] = run.go(128, 1, present=False)
    assert back.batch_size == INITIAL
    assert run.go(INITIAL, 100, present=False) == []


def reported(before: list[float], after: list[float]) -> list[StepBack]:
    """Losses that are reported at 64 samples, and after a growth to 128."""
    watch, found, steps = GrowthWatch(INITIAL), list[StepBack](), 0
    for number, (batch, loss) in enumerate([*((64, x) for x in before), *((128, x) for x in after)], start=1):
        for _ in range(2):  # the same report is known for some time
            steps += SPACING
            signal = NoiseSignal(present=True, size=1.0, updates=steps // SPACING)
            watch.observe(batch_size=batch, steps=steps, signal=signal, loss=(number, loss))
            if (back := watch.step_back()) is not None:
                found.append(back)
    assert not found or watch.hindrance.startswith("a growth was taken back")
    return found


@pytest.mark.parametrize(
    ("before", "after", "backs"),
    [
        ([2.0, 1.5, 1.2], [2.3, 2.3], 0),  # within 2.0 and its spread
        ([2.0, 1.5, 1.2], [3.0, 1.0, 3.0, 1.0], 0),  # not two in a row
        ([2.0, 1.5, 1.2], [3.0, 3.1, 3.2], 1),
        ([1.0, 1.0, 1.0], [1.09, 1.09, 1.09], 0),
        ([1.0, 1.0, 1.0], [1.2, 1.2, 1.2], 1),
        ([-3.0, -3.2, -3.1], [-2.0, -2.0], 1),
        ([2.0, 1.5, 1.2], [math.nan, math.nan, math.nan], 1),
        ([2.0, math.inf, 1.2], [9.0, 9.0], 0),
        ([math.nan, math.nan, math.nan], [math.nan, math.nan], 0),  # as ever
        ([2.0, 1.5], [9.0, 9.0], 0),  # two are no range
        ([2.0, 1.5, 1.2], [1.0] * 8 + [9.0, 9.0], 0),  # another cause
    ],
)
def test_growth_after_which_the_loss_rises_is_taken_back(before: list[float], after: list[float], backs: int) -> None:
    found = reported(before, after)
    assert [back.batch_size for back in found] == [64] * backs
    assert all("after the growth the loss rose to" in back.reason for back in found)


def test_one_estimate_with_a_signal_is_enough_to_stay() -> None:
    run = Run()
    run.go(256, 2)
    for _ in range(10):
        assert run.go(256, 4, present=False) == []
        assert run.go(256, 1) == []


def test_few_estimates_in_many_steps_are_no_quiet_time() -> None:
    watch = GrowthWatch(INITIAL)
    for updates in range(QUIET_UPDATES + 1):
        assert watch.step_back() is None
        signal = NoiseSignal(present=False, size=1.0, updates=1 + updates)
        watch.observe(batch_size=256, steps=1000 * updates, signal=signal)
    assert watch.step_back() is not None


def test_the_same_report_twice_is_no_second_estimate() -> None:
    watch = GrowthWatch(INITIAL)
    for step in range(0, 1000, 10):
        watch.observe(batch_size=256, steps=step, signal=NoiseSignal(present=False, size=1.0, updates=1))
        assert watch.step_back() is None


def test_a_growth_after_which_gradients_rise_is_taken_back() -> None:
    run = Run()
    run.go(128, 10, size=1.0)
    assert run.go(256, RISE_UPDATES, size=1.1 * RISE) == [], "judged after some estimates"
    [back] = run.go(256, 1, size=1.1 * RISE)
    assert (back.batch_size, back.reason) == (
        128,
        "batch 256 -> 128: after the growth squared gradient norms rose to 4.4, from 1 at most",
    )
    assert run.watch.step_back() is None, "asked for again, there is none"
    assert run.watch.growth == 1.0
    assert run.watch.hindrance == f"a growth was taken back, the next may come after step {run.steps + PAUSE_STEPS}"
    run.go(128, PAUSE_STEPS // SPACING)
    assert run.watch.growth == 1.0
    run.go(128, 1)
    assert run.watch.growth == pytest.approx(2.0**0.5), "half the step, which was to the double"
    assert run.watch.hindrance == ""


@pytest.mark.parametrize("several", [RISE_UPDATES - 1, RISE_UPDATES, RISE_UPDATES + 1, 9])
def test_estimates_may_come_several_at_a_time(several: int) -> None:
    run = Run()
    run.go(128, 10)
    run.go(256, 1)
    run.updates += several - 1
    assert bool(run.go(256, 1, size=10.0)) is (several >= RISE_UPDATES)


def test_each_further_growth_taken_back_halves_the_step_again() -> None:
    run, steps = Run(), []
    for _ in range(6):
        run.go(128, 2 * PAUSE_STEPS // SPACING)
        steps.append(run.watch.growth)
        run.go(256, 4, size=10.0)
    assert steps[1:3] == pytest.approx([2.0**0.5, 2.0**0.25])
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] > 1.0, "it is tried again all the same"


def test_a_growth_that_held_gives_the_larger_step_back() -> None:
    run = Run()
    run.go(128, 10)
    run.go(256, 4, size=10.0)
    run.go(128, 20)
    assert run.watch.growth < 2.0
    run.go(160, 20)
    assert run.watch.growth == pytest.approx(2.0)


@pytest.mark.parametrize("size", [0.9 * RISE, 0.01])
def test_gradients_that_stay_in_range_are_no_rise(size: float) -> None:
    run = Run()
    run.go(128, 10, size=1.0)
    assert run.go(256, 30, size=size) == []


def test_rise_long_after_a_growth_is_not_its_doing() -> None:
    run = Run()
    run.go(128, 10)
    run.go(256, 30)
    assert run.go(256, 30, size=100.0) == []


def test_a_rise_after_a_shrinkage_is_not_judged() -> None:
    run = Run()
    run.go(256, 10)
    assert run.go(128, 30, size=100.0) == []


@given(
    reports=st.lists(
        st.tuples(st.sampled_from([32, 64, 96, 128, 512]), st.booleans(), st.floats(1e-9, 1e9), st.integers(0, 3)),
        max_size=150,
    )
)
def test_step_back_is_smaller_reasoned_never_below_the_initial(
    reports: list[tuple[int, bool, float, int]],
) -> None:
    watch, updates = GrowthWatch(INITIAL), 0
    for number, (batch_size, present, size, new) in enumerate(reports):
        updates += new
        signal = NoiseSignal(present=present, size=size, updates=updates) if updates else None
        watch.observe(batch_size=batch_size, steps=10 * number, signal=signal)
        assert 1.0 <= watch.growth <= LARGE_GROWTH
        assert (watch.growth == 1.0) == bool(watch.hindrance)
        if (back := watch.step_back()) is not None:
            assert INITIAL <= back.batch_size < batch_size
            assert back.reason.startswith(f"batch {batch_size} -> {back.batch_size}: ")
            assert watch.step_back() is None
