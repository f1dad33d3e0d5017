"""Ready-made policies for the batch: by noise scale and by schedule."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.adaptation import BatchSchedule, NoiseScaleBatch, Pause, PolicyView, SetBatch
from elastic_ray.adaptation.policies.batch_schedule import parse_schedule
from elastic_ray.adaptation.policies.branch_batch import BranchBatch
from placement.goodput.model import NoiseScale
from tests.adaptation.scripted import ScriptedRun, listed

START = PolicyView(batch_size=32, initial_batch_size=32, max_batch_size=512, epochs=10)


def noise(scale: float) -> NoiseScale:
    """An estimate with this noise scale, where the initial batch is 32."""
    return NoiseScale(sqr=1.0, var=scale / 32)


def run(policy: Any, view: PolicyView = START) -> ScriptedRun:
    return ScriptedRun(policy=policy, view=view, step_s=lambda view: 0.1)


def test_batch_follows_a_noise_scale_that_is_far_enough() -> None:
    script = run(NoiseScaleBatch(smoothing=0.0, hysteresis=1.5, growth=100.0, every=5))
    assert script.steps(20) == [], "no estimate yet"
    assert script.steps(20, noise=noise(40.0)) == [], "40 is not 1.5 times 32"
    assert script.steps(20, noise=noise(100.0)) == [SetBatch(100)]
    assert script.steps(20, noise=noise(70.0)) == [], "and 100 is not 1.5 times 70"
    assert script.steps(20, noise=noise(60.0)) == [SetBatch(60)]
    assert [step % 5 for step, _ in script.asked] == [0, 0]


def test_the_mean_follows_slowly() -> None:
    script = run(NoiseScaleBatch(smoothing=0.9, hysteresis=1.0, every=1))
    script.step(noise=noise(32.0))
    assert script.step(noise=noise(132.0)) == [SetBatch(42)], "0.9 x 32 + 0.1 x 132"
    assert script.step(noise=noise(132.0)) == [SetBatch(51)]


def test_bounds_hold_and_the_loaders_limit_always() -> None:
    wide = run(NoiseScaleBatch(smoothing=0.0, growth=1000.0, every=1, min_batch_size=8, max_batch_size=1000))
    assert wide.steps(3, noise=noise(1e6)) == [SetBatch(512)]
    assert wide.steps(3, noise=noise(0.01)) == [SetBatch(8)]
    narrow = run(NoiseScaleBatch(smoothing=0.0, growth=1000.0, every=1, max_batch_size=100, factor=2.0))
    assert narrow.steps(3, noise=noise(30.0)) == [SetBatch(60)]
    assert narrow.steps(3, noise=noise(400.0)) == [SetBatch(100)]
    assert narrow.steps(3, noise=noise(0.1)) == [SetBatch(32)], "not below the initial one unless told so"


def test_a_change_is_at_most_by_its_growth() -> None:
    script = run(NoiseScaleBatch(smoothing=0.0, growth=2.0, every=1, min_batch_size=1))
    assert script.steps(6, noise=noise(300.0)) == [SetBatch(size) for size in (64, 128, 256)], "300 is close enough"
    assert script.steps(3, noise=noise(1.0)) == [SetBatch(size) for size in (128, 64, 32)]


def test_a_fixed_batch_and_pure_noise_are_left_alone() -> None:
    fixed = run(NoiseScaleBatch(every=1), PolicyView(batch_size=32, initial_batch_size=32))
    assert fixed.steps(20, noise=noise(500.0)) == []
    assert run(NoiseScaleBatch(every=1)).steps(20, noise=NoiseScale(sqr=-1.0, var=1.0)) == []


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=60), st.floats(0.0, 0.99), st.floats(1.0, 4.0))
def test_requests_lie_within_the_bounds_and_what_was_measured(
    scales: list[float], smoothing: float, hysteresis: float
) -> None:
    policy = NoiseScaleBatch(smoothing=smoothing, hysteresis=hysteresis, growth=5.0, every=1, min_batch_size=4)
    script = run(policy)
    present = 32
    for scale in scales:
        for request in script.step(noise=noise(scale)):
            assert isinstance(request, SetBatch)
            assert request.batch_size is not None and 4 <= request.batch_size <= 512
            less, more = sorted((present, request.batch_size))
            assert hysteresis * (less - 0.5) <= more + 0.5, "a half is rounding"
            assert more - 0.5 <= 5.0 * (less + 0.5)
            present = request.batch_size
        assert policy.mean is not None
    assert min(scales) * (1 - 1e-9) <= (policy.mean or 0) <= max(scales) * (1 + 1e-9)


def test_a_step_of_a_schedule_counts_from_that_step() -> None:
    script = run(BatchSchedule({0: 32, 10: 64, 20: 128}))
    sizes = []
    assert listed(script.policy.before_train(script.view)) == [SetBatch(32)]
    for _ in range(30):
        sizes.append(script.view.batch_size)
        script.step()
    assert sizes == [32] * 10 + [64] * 10 + [128] * 10
    assert len(script.asked) == 2, "asked once each"


def test_kungfus_text_is_value_and_length() -> None:
    assert BatchSchedule("32:10,64:10,128:1").schedule == ((0.0, 32), (10.0, 64), (20.0, 128))


@pytest.mark.parametrize(
    ("by", "views", "expected"),
    [
        ("epoch", [{"epoch": epoch} for epoch in range(4)], [[SetBatch(32)], [], [SetBatch(64)], []]),
        (
            "progress",
            [{"epoch": epoch, "epochs": 4} for epoch in range(4)],
            [[SetBatch(32)], [], [SetBatch(64)], []],
        ),
    ],
)
def test_a_schedule_by_epoch_and_by_progress(by: str, views: list[Any], expected: list[Any]) -> None:
    policy = BatchSchedule({0: 32, 2 if by == "epoch" else 0.5: 64}, by=by)
    assert [listed(policy.before_epoch(PolicyView(**view))) for view in views] == expected


def test_without_declared_epochs_there_is_no_progress_to_follow() -> None:
    assert BatchSchedule({0: 64}, by="progress").before_epoch(PolicyView()) is None


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 1000)), min_size=1, max_size=8))
def test_a_schedule_as_text_gives_each_value_its_length(pairs: list[tuple[int, int]]) -> None:
    found = parse_schedule(",".join(f"{value}:{length}" for value, length in pairs))
    assert found == tuple((value, float(length)) for value, length in pairs)


@pytest.mark.parametrize("text", ["", "10", "10:", "a:2", "10:2;20:3", "0:5", "10:0", "10:-1", "10:2:3"])
def test_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as '10:2,100:4'"):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda: NoiseScaleBatch(factor=0),
            ValueError,
            r"NoiseScaleBatch\(factor\) must be above 0 and finite, but got 0",
        ),
        (lambda: NoiseScaleBatch(smoothing=1.0), ValueError, r"\(smoothing\) must be 0 or more and below 1"),
        (
            lambda: NoiseScaleBatch(hysteresis=math.nan),
            ValueError,
            r"\(hysteresis\) must be 1 or more and finite, but got nan",
        ),
        (lambda: NoiseScaleBatch(growth=1), ValueError, r"\(growth\) must be above 1 and finite, but got 1"),
        (lambda: NoiseScaleBatch(every=2.5), TypeError, r"\(every\) must be a whole number, 1 or more, but got 2.5"),
        (lambda: NoiseScaleBatch(min_batch_size=64, max_batch_size=32), ValueError, r"\(max_batch_size\).* 64 or more"),
        (lambda: BatchSchedule({}), TypeError, "with an entry"),
        (lambda: BatchSchedule([1, 2]), TypeError, r"must be a mapping or a text"),
        (lambda: BatchSchedule({0: 0}), ValueError, r"schedule's batch\) must be a whole number, 1 or more, but got 0"),
        (lambda: BatchSchedule({-1: 8}), ValueError, r"schedule's begin\) must be 0 or more"),
        (lambda: BatchSchedule({0: 8}, by="samples"), ValueError, "must be one of step, epoch, progress"),
    ],
)
def test_arguments_are_checked_by_name(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def coming(schedule: dict[float, int], by: str, **facts: Any) -> list[tuple[float, int]]:
    """The batches to come by a schedule, in a view with these facts."""
    return list(BatchSchedule(schedule, by=by).coming_batches(PolicyView(batch_size=10, **facts)))


def test_steps_to_come_are_told_at_the_present_batch() -> None:
    steps = {0: 10, 5: 20, 9: 40}
    assert coming(steps, "step", step=0) == [(50, 20)]
    assert coming(steps, "step", step=5) == [(40, 40)], "the 20 has begun"
    assert coming(steps, "step", step=9) == []


def test_progress_to_come_is_told_in_samples() -> None:
    parts = {0: 10, 0.5: 20, 0.75: 40}
    assert coming(parts, "progress", samples=100, epochs=4, epoch=1) == [(pytest.approx(100), 20), (200, 40)]
    assert coming(parts, "progress", samples=200, epochs=4, epoch=2) == [(100, 40)]
    assert coming({0: 10, 1: 20, 3: 40}, "epoch", samples=100, epochs=4, epoch=1) == [(200, 40)]
    for facts in ({"samples": 100}, {"samples": 400, "epochs": 4, "epoch": 4}, {"epochs": 4}):
        assert coming(parts, "progress", **facts) == []


def test_tokens_to_come_are_samples_within_limits() -> None:
    tokens = {0: 64, 1000: 256, 3000: 4096}
    facts = {"samples": 50, "tokens_per_sample": 10.0}  # 500 tokens
    assert coming(tokens, "tokens", **facts) == [(50, 25), (250, 409)]
    assert coming(tokens, "tokens", max_batch_size=100, **facts) == [(50, 25), (250, 100)]
    assert coming({0: 64, 1000: 3}, "tokens", **facts) == [(50, 1)]
    assert coming({0: 64, 500: 256}, "tokens", **facts) == [], "it counts from now on"
    assert coming(tokens, "tokens", samples=50) == []


@pytest.mark.parametrize(
    ("samples", "each", "most", "expected"),
    [
        (0, 10.0, None, [SetBatch(6)]),
        (100, 10.0, None, [SetBatch(30)]),
        (100, 10.0, 20, [SetBatch(20)]),
        (99, 1000.0, None, [SetBatch(1)]),
        (100, 0.1, None, [SetBatch(64)]),
        (10, 300 / 7, None, [SetBatch(1)]),
        (100, 300 / 7, None, [SetBatch(7)]),
        (100, None, None, []),
    ],
)
def test_a_schedule_by_tokens_is_in_whole_samples(samples: int, each: Any, most: Any, expected: list[Any]) -> None:
    policy = BatchSchedule({0: 64, 1000: 300}, by="tokens")
    view = PolicyView(samples=samples, tokens_per_sample=each, max_batch_size=most)
    assert listed(policy.before_epoch(view)) == expected


def test_requests_differ_by_the_hysteresis() -> None:
    def asked(scale: float, **options: Any) -> list[Any]:
        given = {"smoothing": 0.0, "hysteresis": 2.0, "growth": 100.0, "every": 1, "min_batch_size": 1, **options}
        return run(NoiseScaleBatch(**given)).step(noise=noise(scale))

    assert asked(64.0) == [SetBatch(64)] and asked(63.9) == []
    assert asked(16.0) == [SetBatch(16)] and asked(16.1) == []
    assert asked(32.4, hysteresis=1.0) == [], "which rounds to the present batch"
    assert asked(0.0) == [SetBatch(1)] and asked(0.0, growth=2.0) == [SetBatch(16)]
    assert asked(1e9, min_batch_size=400, max_batch_size=400) == [SetBatch(400)]


def test_the_present_batch_counts_until_one_was_asked() -> None:
    policy = NoiseScaleBatch(smoothing=0.0, growth=2.0, every=1)
    view = PolicyView(batch_size=64, initial_batch_size=32, max_batch_size=512, noise=noise(500.0))
    assert [listed(policy.after_step(view)) for _ in range(3)] == [[SetBatch(size)] for size in (128, 256, 500)]


def test_a_branch_holds_its_batch_and_pauses_once() -> None:
    policy = BranchBatch(100, samples=250)

    def asked(samples: int, batch_size: int) -> list[Any]:
        return listed(policy.before_step(PolicyView(samples=samples, batch_size=batch_size)))

    assert asked(1000, 32) == [SetBatch(100)]
    for samples, size in ((1000, 32), (1032, 109), (1141, 91), (1232, 100), (1249, 32), (1249, 32), (1249, 32)):
        assert asked(samples, size) == []
    assert asked(1250, 100) == [Pause("the branch has trained on its samples")] and asked(1350, 100) == []


def test_a_branch_at_another_batch_ends_in_an_error() -> None:
    for size in (89, 111, 300):
        policy = BranchBatch(100, samples=250)
        policy.before_step(PolicyView(batch_size=32))
        for _ in range(4):
            assert policy.before_step(PolicyView(batch_size=size)) is None
        with pytest.raises(ValueError, match=f"at batch 100 trains at {size}"):
            policy.before_step(PolicyView(batch_size=size))
