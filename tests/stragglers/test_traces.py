"""What the traces of ranks make of single steps, worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from elastic_ray.monitoring.measures import WorkerMeasures
from elastic_ray.stragglers.detection import (
    RESPONSES,
    SendTrace,
    SlowWorker,
    SpeedTrace,
    StragglerCause,
    StragglerConfig,
    lower_median,
)
from elastic_ray.stragglers.watch import MemoryTrace, RecentSteps, _measured_again
from tests.stragglers.group import Group, Times, TypedGroup

ALL = (0, 1, 2)


def traced(*rows: Sequence[float], work: Sequence[float] = (4, 4, 4), data: Sequence[float] = (0, 0, 0)) -> SpeedTrace:
    """A trace of these times of three ranks, after its warm-up."""
    trace = SpeedTrace()
    for row in ((1.0, 1.0, 9.0), (1.0, 1.0, 9.0), *rows):
        trace = trace.add(work=work, busy_s=row, data_s=data, among=ALL)
    return trace


def test_the_middle_of_an_even_number_is_the_smaller() -> None:
    assert [lower_median(row) for row in ([2.0], [2.0, 1.0], [3.0, 1.0, 2.0], [4.0, 1.0, 3.0, 2.0])] == [2, 1, 2, 2]


def test_two_steps_warm_up_and_empty_ones_are_none() -> None:
    assert traced().steps == 0 and traced().ratio(2, ALL) == 1.0
    once = traced((1.0, 1.0, 1.0))
    assert (once.skipped, once.steps, once.busy, once.deviation) == (2, 1, (1.0, 1.0, 1.0), 0.0)
    for work, busy in (((4, 4, 0), (1.0, 1.0, 1.0)), ((4, 4, 4), (1.0, 1.0, 0.0))):
        assert once.add(work=work, busy_s=busy, data_s=(0, 0, 0), among=ALL) is once
    assert not traced(*[(1.0, 1.0, 1.0)] * 9).ready and traced(*[(1.0, 1.0, 1.0)] * 10).ready


def test_averages_are_means_first_then_move_by_tenths() -> None:
    two = traced((1.0, 1.0, 1.0), (1.0, 1.0, 3.0))
    assert two.busy == pytest.approx((0.8, 0.8, 1.4)) and two.ratio(2, ALL) == pytest.approx(1.75)
    assert two.deviation == pytest.approx(0.4), "0.6 and 1.8 of the mean: 0.4, 0.4 and 0.8 away"
    three = traced((1.0, 1.0, 1.0), (1.0, 1.0, 3.0), (1.0, 1.0, 3.0))
    assert three.busy[0] == pytest.approx(0.8 + (0.6 - 0.8) / 3) and three.deviation == pytest.approx(0.4 - 0.2 / 2)
    many = traced(*[(1.0, 1.0, 1.0)] * 20, (1.0, 1.0, 3.0))
    assert many.busy == pytest.approx((0.96, 0.96, 1.08)) and many.deviation == pytest.approx(0.04)


def test_time_is_compared_for_equal_work() -> None:
    assert traced((1.0, 2.0, 1.0), work=(4, 8, 4)).ratio(1, ALL) == 1.0
    assert traced((1.0, 1.0, 1.0), work=(4, 8, 4)).ratio(1, ALL) == 0.5
    assert traced((1.0, 1.0, 1.0), work=(4, 2, 4)).ratio(1, ALL) == 1.0, "a fixed part may be all"
    waits = traced((1.0, 4.0, 1.0), work=(4, 8, 4), data=(0.0, 2.0, 0.5))
    assert waits.data == pytest.approx((0.0, 0.75, 0.375)), "halves of the work, over the mean of 4/3"


def test_long_times_count_as_four_in_averages_alone() -> None:
    trace = traced((1.0, 1.0, 100.0), data=(0.0, 0.0, 50.0))
    assert trace.ratio(2, ALL) == 4.0 and trace.last_ratio(2, ALL) == 100.0
    assert trace.data == pytest.approx((0.0, 0.0, 2.0)), "no longer than what counts"
    last = traced(*[(1.0, 1.0, float(n)) for n in (9, 9, 9, 2, 3, 4, 5, 6)])
    assert [row[2] / row[0] for row in last.last] == [2, 3, 4, 5, 6] and last.last_ratio(2, ALL) == 4.0


def test_slow_is_below_four_fifths_in_seven_steps() -> None:
    fast, slow = (1.0, 1.0, 1.0), (1.0, 1.0, 2.0)
    for rows, is_slow in (
        ([slow] * 9, False),
        ([slow] * 10, True),
        ([(1.0, 1.0, 1.25)] * 20, False),
        ([(1.0, 1.0, 1.26)] * 20, True),
        ([slow] * 20 + [fast] * 3, True),
        ([slow] * 20 + [fast] * 4, False),
        ([slow] * 20 + [fast] * 10 + [slow] * 6, False),
    ):
        assert traced(*rows).slow(2, ALL) is is_slow, rows
    assert traced(*[slow] * 10).recent == (0, 0, 0b1111111111) and traced(*[slow] * 30, fast).recent[2] == 0b1111111110


def test_slow_ones_are_so_on_average_as_well() -> None:
    steps = {"recent": (0, 0, 1023), "steps": 10}
    assert not SpeedTrace(busy=(1.0, 1.0, 1.25), **steps).slow(2, ALL)
    assert SpeedTrace(busy=(1.0, 1.0, 1.26), **steps).slow(2, ALL)


def test_noise_explains_three_of_its_deviations() -> None:
    busy = {"busy": (1.0, 1.0, 1.5), "recent": (0, 0, 1023), "steps": 10}
    assert SpeedTrace(**busy, deviation=0.16).slow(2, ALL) and not SpeedTrace(**busy, deviation=0.17).slow(2, ALL)


@pytest.mark.parametrize(("data", "waits"), [((0.0, 0.1, 0.4), True), ((0.0, 0.1, 0.35), False), ((0, 0, 0), False)])
def test_data_explains_most_of_a_ranks_excess(data: tuple[float, ...], waits: bool) -> None:
    trace = SpeedTrace(steps=10, busy=(1.0, 1.0, 1.5), data=data, recent=(0, 0, 0))
    assert trace.waits_for_data(2, ALL) is waits
    assert SpeedTrace.from_state({**trace.to_state(), "busy": [1.0, 1.0, 1.5], "last": []}) == trace


def sent(times: int, *sending_s: float, trace: SendTrace | None = None, **facts: Any) -> SendTrace:
    trace = trace or SendTrace()
    for _ in range(times):
        trace = trace.add(sending_s=sending_s, **{"mib": [10.0] * len(sending_s), "seconds": 1.0, **facts})
    return trace


def test_a_look_is_a_second() -> None:
    short = sent(3, 0.1, 0.3, 0.1, seconds=0.25)
    assert (short.looks, short.seconds) == (0, 0.75) and short.sending_s == pytest.approx((0.3, 0.9, 0.3))
    assert short.mib == (30.0, 30.0, 30.0)
    look = sent(1, 0.1, 0.3, 0.1, trace=short, seconds=0.25)
    assert (look.looks, look.seconds, look.sending_s, look.recent) == (1, 0.0, (), (0, 1, 0))
    assert look.ratios == pytest.approx((1.0, 3.0, 1.0))


@pytest.mark.parametrize(
    ("sending_s", "slow"),
    [
        ((0.1, 0.31, 0.1), (1,)),
        ((0.1, 0.3, 0.1), ()),  # not more than a fifth of the second
        ((0.3, 0.59, 0.3), ()),  # not twice as long
        ((0.3, 0.61, 0.3), (1,)),
        ((0.1, 0.9, 0.9), (1, 2)),  # the lower median of the others counts
    ],
)
def test_a_slow_sender_takes_much_and_long(sending_s: tuple[float, ...], slow: tuple[int, ...]) -> None:
    assert sent(6, *sending_s).slow == () and sent(7, *sending_s).slow == slow


@pytest.mark.parametrize(
    ("sending_s", "lasts"),
    [((0.1, 0.21, 0.1), True), ((0.1, 0.199, 0.1), False), ((0.4, 0.57, 0.4), True), ((0.4, 0.56, 0.4), False)],
)
def test_half_of_it_ends_a_verdict(sending_s: tuple[float, ...], lasts: bool) -> None:
    slow = sent(10, 0.1, 0.5, 0.1)
    assert sent(3, *sending_s, trace=slow).slow == (1,), "seven of the last ten were slow"
    assert (sent(4, *sending_s, trace=slow).slow == (1,)) is lasts


def test_ranks_that_send_nothing_or_at_once() -> None:
    assert sent(1, 0.0, 0.0).ratios == (1.0, 1.0)
    assert sent(1, 0.0, 0.5, 0.0).ratios == (1.0, 100.0, 1.0), "a thousandth of the second at least"
    assert sent(1, 0.0, 0.05, 0.0).ratios[1] == pytest.approx(50.0)
    assert sent(1, 0.5, 0.5, 0.5, mib=[0.0, 10.0, 10.0]).ratios == (0.0, 1.0, 1.0)
    assert sent(1, 0.5, 0.5, mib=[0.0, 0.0]).ratios == (1.0, 1.0)
    state = {
        name: list(value) if isinstance(value, tuple) else value for name, value in sent(3, 1, 2).to_state().items()
    }
    assert SendTrace.from_state(state) == sent(3, 1, 2)


def memory(faults: Sequence[float], compute: Sequence[float], used: Sequence[float] = (0.5, 0.5, 0.5)) -> bool:
    trace = MemoryTrace(faults_s=tuple(faults), compute_s=tuple(compute), used=tuple(used))
    return trace.short(2, ALL)


@pytest.mark.parametrize(
    ("facts", "short"),
    [
        (((0.0, 0.0, 0.25), (1.0, 1.0, 2.0)), True),
        (((0.0, 0.0, 0.24), (1.0, 1.0, 2.0)), False),
        (((0.1, 0.1, 0.25), (1.0, 1.0, 2.0)), False),
        (((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.5, 0.5, 0.99)), False),  # it takes no longer
        (((0.0, 0.0, 0.0), (1.0, 1.0, 2.0), (0.5, 0.5, 0.95)), True),
        (((0.0, 0.0, 0.0), (1.0, 1.0, 2.0), (0.5, 0.5, 0.94)), False),
        (((0.0, 0.0, 0.0), (1.0, 1.0, 2.0), (0.95, 0.95, 0.99)), False),  # so have all
    ],
)
def test_memory_is_short_by_faults_or_fullness(facts: tuple[Any, ...], short: bool) -> None:
    assert memory(*facts) is short


def test_memory_is_an_average_over_steps() -> None:
    trace = MemoryTrace()
    assert not trace.short(0, (0, 1))
    for faults in ((0, 1000), (0, 2000)):
        trace = trace.add(faults=faults, compute_s=(1.0, 2.0), used=(0.1, 0.2))
    assert trace.faults_s == pytest.approx((0.0, 0.11)) and trace.used == (0.1, 0.2)
    assert not trace.short(1, (1,)), "there is no other"
    assert MemoryTrace.from_state({name: list(value) for name, value in trace.to_state().items()}) == trace


def test_short_steps_are_summed() -> None:
    measured = [WorkerMeasures(compute_s=1.0, data_s=0.5, step_s=2.0, sending_s=0.1, major_faults=3.0)] * 2
    measured[1] = dataclasses.replace(measured[1], step_s=3.0, compute_s=2.0)
    twice = RecentSteps().plus([[1, 2], [4]], measured).plus([[1, 2], [4]], measured)
    assert (twice.work, twice.busy_s, twice.data_s, twice.seconds) == ((6, 8), (3.0, 5.0), (1.0, 1.0), 6.0)
    assert (twice.faults, twice.sending_s) == ((6.0, 6.0), (0.2, 0.2))


def worker(**facts: Any) -> SlowWorker:
    return SlowWorker(**{"worker": "w", "node": "n", "ratio": 3.0, "cause": StragglerCause.WORKER, **facts})


@pytest.mark.parametrize(
    ("slow", "times", "fixed", "ratio"),
    [
        (worker(), 2.5, None, 2.5),
        (worker(weight=0.5), 1.8, 0.2, 3.0),  # 3 (0.2 + 0.8 / 2)
        (worker(weight=0.5), 1.2, 0.0, 2.4),
        (worker(weight=0.5), 6.0, 1.0, 6.0),
        (worker(weight=0.25, fixed=0.2), 1.2, 0.2, 3.0),  # 3 (0.2 + 0.8 / 4)
        (worker(weight=0.25, fixed=0.2), 0.8, 0.2, 2.0),
    ],
)
def test_ratio_at_equal_work_from_smaller_shares(slow: SlowWorker, times: float, fixed: Any, ratio: float) -> None:
    again = _measured_again(slow, times)
    assert again.ratio == pytest.approx(ratio) and again.fixed == (fixed if fixed is None else pytest.approx(fixed))


def test_each_response_includes_those_before_it() -> None:
    configs = [StragglerConfig(response=response) for response in RESPONSES]
    assert RESPONSES == ("ignore", "tell", "share", "replace")
    assert [(each.watches, each.shares, each.replaces) for each in configs] == [
        *((False, False, False), (True, False, False), (True, True, False), (True, True, True))
    ]
    for i, more in enumerate(configs):
        assert [more.goes_beyond(less) for less in configs] == [i > j for j in range(4)]
    assert StragglerConfig().patience_s == 60.0


@pytest.mark.parametrize(("slow", "replaced"), [(1.45, False), (1.55, True)])
def test_below_two_thirds_is_replaced_after_the_patience(slow: float, replaced: bool) -> None:
    group = Group(StragglerConfig(response="replace", patience_s=20.0), sample_s=0.1)
    group.slow = {"w4": slow}
    group.step(15)
    (found,) = group.watch.slow
    since_s = found.slow_s
    while group.watch.slow[0].slow_s < 20.0:
        assert not group.watch.slow[0].replace
        group.step()
    assert since_s < 20.0 and group.watch.slow[0].replace is replaced


def test_without_that_response_nobody_is_replaced() -> None:
    group = Group(StragglerConfig(response="share", patience_s=1.0))
    group.slow = {"w4": 3.0}
    group.step(100)
    assert group.watch.slow[0].slow_s > 1.0 and not group.watch.slow[0].replace


def test_types_shares_move_after_ten_steps_at_once() -> None:
    group = TypedGroup(["a", "b"], {"a": 1.0, "b": 3.0})
    group.run(11)
    assert group.types.changes == 0 and group.types.weights(None) is None
    group.run(1)
    assert group.types.changes == 1 and group.types.weights(None) == pytest.approx((1.0, 1 / 3))
    assert group.types.weights((1.0, 0.5)) == pytest.approx((1.0, 1 / 6))
    assert group.types.weights((0.5,)) == pytest.approx((1.0, 1 / 3)), "of another group"
    group.run(50)
    assert group.types.changes == 1


@pytest.mark.parametrize(("ratio", "changes"), [(1.09, 0), (1.11, 1)])
def test_types_shares_move_by_a_tenth_at_least(ratio: float, changes: int) -> None:
    for slow in ({"a": ratio, "b": 1.0}, {"a": 1.0, "b": ratio}):
        group = TypedGroup(["a", "b"], slow)
        group.run(40)
        assert group.types.changes == changes


def test_a_type_that_hardly_moves_keeps_a_least_share() -> None:
    group = TypedGroup(["a", "b"], {"a": 1.0, "b": 1000.0}, Times(fixed_s=1.0))
    group.run(12)
    assert group.types.weights(None) == (1.0, 1 / 64)


def test_types_are_compared_as_if_equally_fast() -> None:
    group = TypedGroup(["a", "b", "b"], {"a": 1.0, "b": 3.0})
    group.run(12)
    assert group.types.comparable([[6, 3], [2, 1], [1, 1]]) == [
        [6.0, 3.0],
        pytest.approx([6, 3]),
        pytest.approx([3, 3]),
    ]
    group.measured = [WorkerMeasures(compute_s=s, data_s=d) for s, d in ((1.0, 0.0), (2.0, 1.0), (4.0, 2.0))]
    scaled = [(each.compute_s, each.data_s) for each in group.types.comparable_measures()]
    assert scaled == [(1.0, 0.0), pytest.approx((2 / 3, 1 / 3)), pytest.approx((4 / 3, 2 / 3))]
    group.measured = group.measured[:2]
    assert group.types.comparable_measures() is group.measured


def test_a_type_without_a_time_stays_as_it_is() -> None:
    group = TypedGroup(["a", "b", "c"], {"a": 1.0, "b": 3.0, "c": 1.0})
    group.measured = [WorkerMeasures(compute_s=s) for s in (1.0, 0.0, 2.0)]
    assert [each.compute_s for each in group.types.comparable_measures()] == [1.0, 0.0, 1.0]


def test_shares_that_waver_rest_twice_as_long_each_time() -> None:
    group, rests = Group(StragglerConfig(response="share"), batch=100), list[int]()
    for turn in range(80):
        group.slow = {"w4": (3.0, 1.7)[turn % 2]}
        group.step(25)
        if (rest := group.watch.capture()["rest"]) not in rests:
            rests.append(rest)
    assert rests == [10 * 2**n for n in range(len(rests))] and len(rests) >= 3 and rests[-1] <= 320


def test_types_measures_are_told_for_a_micro_batch() -> None:
    group = TypedGroup(["a", "b"], {"a": 1.0, "b": 3.0})
    group.measured = [WorkerMeasures(compute_s=4.0, data_s=1.0), WorkerMeasures(compute_s=8.0)]
    for _ in range(2 + 3):
        group.types.after_step([[5.0, 3.0], [1.0, 1.0]])
    told = {each.gpu: (each.workers, each.atomic_bsz, each.grad_time) for each in group.types.take()}
    assert told == {"a": (1, 4.0, 2.0), "b": (1, 1.0, 4.0)}
    group.types.after_step([[5.0, 3.0], [0.0, 0.0]])
    assert group.types.take() == ()
    before = group.types.changes
    group.types.restore(group.types.capture())
    assert group.types.changes == before + 1
