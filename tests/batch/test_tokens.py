"""A batch in tokens, as samples (pure)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.adaptation.policies.batch_schedule import BatchSchedule
from elastic_ray.adaptation.requests import SetBatch
from elastic_ray.adaptation.view import PolicyView
from elastic_ray.batch.limits import BatchLimits
from elastic_ray.batch.tokens import TokenBatch, length_of, read_token_batch, token_count
from elastic_ray.state.progress import RunProgress


def read(batch: Any, per_sample: Any, most: Any = None, first: float | None = None) -> TokenBatch:
    found = read_token_batch(batch, most, per_sample, counted_first=first)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("given_as", "tokens"), [(7, 7), ("12", 12), ("0.25B", 250_000_000), ("64k", 64_000), ("1.5 M", 1_500_000)]
)
def test_counts_are_numbers_or_texts(given_as: Any, tokens: int) -> None:
    assert token_count("batch_tokens", given_as) == tokens


def test_ramp_of_the_documentation() -> None:
    batch = read([(0, 65_536), ("0.25B", 262_144)], 1024)
    assert batch.ramp == ((0, 65_536), (250_000_000, 262_144))
    assert (batch.batch_size, batch.max_batch_size) == (64, 256)


@given(st.integers(1, 10**7), st.integers(1, 10**4))
def test_samples_fill_the_declared_tokens(tokens: int, each: int) -> None:
    count = TokenBatch(ramp=((0, tokens),), per_sample=float(each)).samples(tokens)
    assert count == max(1, tokens // each)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 5000)), min_size=1, max_size=50))
def test_mean_stays_near_what_was_counted(steps: list[tuple[int, int]]) -> None:
    run = RunProgress()
    for samples, weight in steps:
        run.count_weights(weight, samples)
        if run.weighed:
            mean = run.weighed / run.weighed_samples
            assert abs(mean - run.tokens_per_sample) <= 0.05 * run.tokens_per_sample * (1 + 1e-9)
    assert run.weighed_samples == sum(samples for samples, _ in steps)
    assert RunProgress.from_state(run.to_state()) == run


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 200), st.integers(1, 200))
def test_limits_follow_what_was_counted(first: int, more: int, before: int, after: int) -> None:
    batch = read(first * before, "weigh", (first + more) * before, first=before)
    limits = BatchLimits(init_batch_size=batch.batch_size, max_batch_size=batch.max_batch_size)
    moved, found = batch.limits(limits, float(after), None)
    assert found.init_batch_size == max(1, first * before // after) and moved.per_sample == after
    assert found.max_batch_size == max(found.init_batch_size, (first + more) * before // after)
    assert moved.limits(found, float(before), None) == (batch, limits)


def test_no_batch_exceeds_an_epoch() -> None:
    counted, fixed = read(640, "weigh", 6400, first=8), read([(0, 64), ("1B", 6400)], 8)
    assert [counted.most_within(epoch) for epoch in (None, 900, 96)] == [800, 800, 96]
    with pytest.raises(ValueError, match=r"batch_tokens must be at most an epoch's 10 samples.*but got 640"):
        counted.most_within(10)
    with pytest.raises(ValueError, match=r"batch_tokens's batch must be at most an epoch's 96 samples of 8 tokens"):
        fixed.most_within(96)
    with pytest.raises(ValueError, match=r"max_batch_tokens must be at most an epoch's 96 samples.*but got 6400"):
        read(64, 8, 6400).most_within(96)
    limits = counted.limits(BatchLimits(init_batch_size=80), 1e-6, 96)[1]
    assert (limits.init_batch_size, limits.max_batch_size) == (96, None)


def test_schedule_goes_by_the_counted_tokens() -> None:
    policy = BatchSchedule({0: 64, 1000: 256}, by="tokens")

    def asked(counted: float) -> Any:
        return policy.after_step(PolicyView(samples=100, tokens_per_sample=8.0, counted_tokens=counted))

    assert [asked(999.0), asked(1000.0)] == [SetBatch(8), SetBatch(32)]


def test_schedule_in_tokens_asks_for_samples() -> None:
    policy = BatchSchedule({0: 64, 1000: 256}, by="tokens")

    def asked(samples: int, each: float) -> Any:
        return policy.after_step(PolicyView(samples=samples, tokens_per_sample=each, max_batch_size=99))

    assert [asked(4, 16.0), asked(8, 16.0), asked(62, 16.0)] == [SetBatch(4), None, None]
    assert [asked(63, 16.0), asked(64, 16.0), asked(130, 8.0)] == [SetBatch(16), None, SetBatch(32)]
    assert asked(2000, 1.0) == SetBatch(99)  # no more than the loader allows


@pytest.mark.parametrize(
    ("sample", "length"),
    [({"input_ids": [1, 2, 3], "mask": [1]}, 3), (("text", 1), 4), ([5, 6], 2), (3, None), ((), None)],
)
def test_length_is_that_of_the_first_part(sample: Any, length: int | None) -> None:
    assert length_of(sample) == length


@pytest.mark.parametrize(
    ("batch", "most", "each", "error", "said"),
    [
        (128, None, None, ValueError, "batch_tokens=128 needs tokens_per_sample"),
        (None, None, 16, ValueError, "tokens_per_sample=16 belongs to batch_tokens"),
        (None, "1M", None, ValueError, "max_batch_tokens='1M' belongs to batch_tokens"),
        (128, 64, 16, ValueError, "max_batch_tokens must be at least batch_tokens=128, but got 64"),
        (12, None, 16, ValueError, "batch_tokens must be at least tokens_per_sample=16, one sample, but got 12"),
        ("1.5X", None, 16, TypeError, "batch_tokens must be a whole number of tokens.*but got '1.5X'"),
        (True, None, 16, TypeError, "batch_tokens must be a whole number"),
        (0, None, 16, ValueError, "batch_tokens must be 1 or more tokens, but got 0"),
        (128, None, "words", ValueError, "tokens_per_sample must be a number of tokens or 'weigh', but got 'words'"),
        (128, None, "weigh", ValueError, "needs a map-style dataset"),
        ([(5, 64)], None, 16, ValueError, "must begin at 0 tokens and rise"),
        ([(0, 64), ("1K", 128), (1000, 256)], None, 16, ValueError, "must begin at 0 tokens and rise"),
        ([(0, 64, 1)], None, 16, TypeError, "must hold pairs"),
        ([(0, 64), (10, 128)], 512, 16, ValueError, "max_batch_tokens=512 and a ramp of batch_tokens exclude"),
    ],
)
def test_what_cannot_be_right_is_named(batch: Any, most: Any, each: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        read_token_batch(batch, most, each, counted_first=None)
