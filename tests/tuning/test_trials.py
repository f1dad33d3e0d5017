"""The policy that turns rungs, ranks and remaining budget into weights."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.trials import Promise, TrialRecord, chance, lacks_metric, score_of, weights

PROMISE = Promise(metric="accuracy", mode="max", max_t=27, grace_period=1, reduction_factor=3)

values = st.lists(st.floats(0, 1), max_size=27).map(tuple)
sweeps = st.lists(st.tuples(values, st.booleans()), min_size=1, max_size=12).map(
    lambda rows: [TrialRecord(trial=f"t{i}", values=v, running=r) for i, (v, r) in enumerate(rows)]
)


@pytest.mark.thorough
@given(sweeps)
def test_every_running_trial_has_weight_within_bounds_and_reason(records: list[TrialRecord]) -> None:
    found = weights(records, PROMISE)
    assert set(found) == {each.trial for each in records if each.running}
    assert all(0.25 <= each.value <= 4.0 and "reports expected" in each.reason for each in found.values())


@given(sweeps)
def test_of_two_equally_far_the_better_never_weighs_less(records: list[TrialRecord]) -> None:
    found = weights(records, PROMISE)
    running = [each for each in records if each.running and each.values]
    for a in running:
        for b in running:
            if len(a.values) == len(b.values) and a.values[-1] > b.values[-1]:
                assert found[a.trial].value >= found[b.trial].value - 1e-9


@given(sweeps, st.randoms())
def test_the_order_of_the_trials_does_not_matter(records: list[TrialRecord], random: object) -> None:
    shuffled = list(records)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    before, after = weights(records, PROMISE), weights(shuffled, PROMISE)
    assert {t: round(w.value, 9) for t, w in before.items()} == {t: round(w.value, 9) for t, w in after.items()}


@given(sweeps)
def test_a_smaller_loss_counts_as_a_larger_accuracy(records: list[TrialRecord]) -> None:
    turned = [dataclasses.replace(each, values=tuple(-v for v in each.values)) for each in records]
    least = dataclasses.replace(PROMISE, mode="min")
    assert weights(records, PROMISE) == weights(turned, least)


def test_near_its_rungs_top_a_trial_grows() -> None:
    cut = [TrialRecord(trial=f"cut{i}", values=(0.1 * i, 0.1 * i), running=False) for i in range(6)]
    top, bottom = TrialRecord(trial="top", values=(0.9, 0.9)), TrialRecord(trial="bottom", values=(0.05, 0.05))
    found = weights([*cut, top, bottom], PROMISE)
    assert found["top"].value > 1.0 > found["bottom"].value
    assert chance(top, [*cut, top, bottom], PROMISE) > 0.7 > 0.3 > chance(bottom, [*cut, top, bottom], PROMISE)


def test_a_tie_is_half_a_win() -> None:
    """Half of one peer: 1/2 / (2/3) of the way to the top, which counts 1 beside a prior of 1/3 that counts 3."""
    one, other = TrialRecord(trial="one", values=(0.5,)), TrialRecord(trial="other", values=(0.5,))
    assert chance(one, [one, other], PROMISE) == pytest.approx((0.75 + 3 * (1 / 3)) / 4)
    best = TrialRecord(trial="best", values=(0.6,))
    assert chance(best, [one, other, best], PROMISE) == pytest.approx((2 * 1.0 + 1.0) / 5), "at the top at most"


def test_what_is_expected_is_said_in_numbers() -> None:
    """One report to the rung at 3, and a third of the 24 after it: alone, and beside one that has just begun."""
    two = TrialRecord(trial="two", values=(0.5, 0.5))
    (alone,) = weights([two], PROMISE).values()
    reason = "passes rung 3 with a chance of 0.33: 9.0 more reports expected, 9.0 on average"
    assert (alone.value, alone.reason) == (1.0, reason)
    found = weights([two, TrialRecord(trial="new")], PROMISE)  # 1 to the first rung, and a third of 26
    assert found["new"].value == pytest.approx((1 + 26 / 3) / ((9 + 1 + 26 / 3) / 2))
    assert chance(two, [two, TrialRecord(trial="new"), TrialRecord(trial="one", values=(0.1,))], PROMISE) == 1 / 3


def test_trials_that_all_have_ended_weigh_alike() -> None:
    ended = [TrialRecord(trial=name, values=(0.5,) * 27) for name in "ab"]
    assert [each.value for each in weights(ended, PROMISE).values()] == [1.0, 1.0]


def test_of_two_survivors_one_with_more_left_weighs_more() -> None:
    early, late = TrialRecord(trial="early", values=(0.9,) * 9), TrialRecord(trial="late", values=(0.9,) * 26)
    found = weights([early, late], PROMISE)
    assert found["early"].value > found["late"].value


def test_a_run_after_a_checkpoint_adds_to_its_reports() -> None:
    paused = TrialRecord(trial="poor", values=(0.1, 0.2, 0.3), running=False)
    assert paused.told(3, (0.4,)).values == (0.1, 0.2, 0.3, 0.4)
    assert paused.told(2, (0.25, 0.35)).values == (0.1, 0.2, 0.25, 0.35)
    assert paused.told(0, (0.9,)).values == (0.9,)
    unheard = TrialRecord(trial="poor").told(2, (0.3,)).values
    assert [math.isnan(value) for value in unheard] == [True, True, False]


def test_without_a_promise_all_weigh_alike() -> None:
    found = weights([TrialRecord(trial="a", values=(1.0,)), TrialRecord(trial="b")], None)
    assert [each.value for each in found.values()] == [1.0, 1.0]


def test_a_metric_that_is_no_number_ranks_last() -> None:
    good, bad = TrialRecord(trial="good", values=(0.0,)), TrialRecord(trial="bad", values=(math.nan,))
    found = weights([good, bad], PROMISE)
    assert found["good"].value > found["bad"].value


def test_a_metric_is_found_by_ray_tunes_name() -> None:
    nested = {"eval": {"accuracy": 0.5, "top/5": {"mean": 0.7}}, "loss": 1, "said": "high", "unset": None}
    found = {name: score_of(nested, name) for name in ("eval/accuracy", "eval/top/5/mean", "loss")}
    assert found == {"eval/accuracy": 0.5, "eval/top/5/mean": 0.7, "loss": 1.0}
    assert [score_of(nested, name) for name in ("accuracy", "eval", "unset")] == [None] * 3
    assert score_of(nested, "accuracy", "default", "loss") == 1.0
    assert math.isnan(score_of(nested, "said") or 0.0)
    assert math.isnan(score_of({"huge": 10**400}, "huge") or 0.0)
    assert lacks_metric(nested, PROMISE).endswith(
        "metric='accuracy'), but what was reported is 'loss', 'eval/accuracy', 'eval/top/5/mean', 'said', 'unset': "
        'report it, or let the promise name what is (a nested metric as "eval/accuracy")'
    )


@pytest.mark.parametrize("value", ["high", math.nan])
def test_a_metric_that_is_no_number_is_told(value: object) -> None:
    said = lacks_metric({"accuracy": value, "loss": 1.0}, PROMISE)
    assert said == f"trials are compared by 'accuracy', but {value!r} is no number: report one"


def test_a_promise_says_what_is_better() -> None:
    with pytest.raises(TypeError, match="mode"):
        Promise(metric="loss")  # type: ignore[call-arg]


def test_all_rungs_end_with_the_most_reports() -> None:
    assert PROMISE.rungs == (1, 3, 9, 27)
    assert Promise(metric="a", mode="max", max_t=1).rungs == (1,)
    assert Promise(metric="a", mode="max", max_t=10, grace_period=2, reduction_factor=3).rungs == (2, 6, 10)
    many = Promise(metric="a", mode="max", max_t=10**9, reduction_factor=1 + 1e-9).rungs
    assert len(many) <= 33 and many[-1] == 10**9


def test_without_an_end_the_longest_counts() -> None:
    endless = dataclasses.replace(PROMISE, max_t=None)
    assert (endless.rungs, endless.next_rung(30)) == ((), 81)
    records = [TrialRecord(trial=name, values=(score,) * 40) for name, score in {"best": 0.9, "worst": 0.1}.items()]
    records.append(TrialRecord(trial="early", values=(0.5,)))
    found = weights(records, endless)
    assert found["best"].value == found["worst"].value == 0.25, "no longer one is known: nothing more is expected"
    assert found["early"].value > 2
    assert [each.value for each in weights([TrialRecord(trial=name) for name in "ab"], endless).values()] == [1.0, 1.0]


@pytest.mark.parametrize("reports", range(30))
def test_rungs_are_those_of_successive_halving(reports: int) -> None:
    assert PROMISE.next_rung(reports) == next((r for r in (1, 3, 9, 27) if r > reports), 27)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"metric": ""}, "metric must be the name"),
        ({"mode": "best"}, "'max' or 'min', but got 'best'"),
        ({"grace_period": 0}, "grace_period must be between 1 and max_t"),
        ({"grace_period": 28}, "grace_period must be between 1 and max_t"),
        ({"reduction_factor": 1.0}, "reduction_factor must be above 1, but got 1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(PROMISE, **wrong)
