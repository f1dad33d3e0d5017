"""Batch sizes that are declared by progress: what is read, and what is refused (pure)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.adaptation import PolicyView
from elastic_ray.adaptation.policies.batch_schedule import BatchSchedule
from elastic_ray.batch.growth import read_ramp


def test_one_batch_size_is_no_ramp() -> None:
    assert read_ramp(64) == (64, ())
    assert read_ramp([(0, 64), (0.1, 256)]) == (64, ((0.0, 64), (0.1, 256)))
    assert read_ramp([(0, 64)]) == (64, ((0.0, 64),))
    assert read_ramp(((0, 1), [0.5, 2], (0.999, 1))) == (1, ((0.0, 1), (0.5, 2), (0.999, 1)))


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ([], ValueError, "must begin at progress 0"),
        ([(0.1, 4)], ValueError, "must begin at progress 0"),
        ([(0, 4), (0, 8)], ValueError, "must rise, and stay below 1"),
        ([(0, 4), (0.5, 8), (0.4, 2)], ValueError, "must rise, and stay below 1"),
        ([(0, 4), (1.0, 8)], ValueError, "must rise, and stay below 1"),
        ([(0, 4), (0.5, 0)], ValueError, "must be 1 or more, but got 0"),
        ([4, 8], TypeError, "must hold pairs"),
        ([(0, 4, 8)], TypeError, "must hold pairs"),
        ([(0,)], TypeError, "must hold pairs"),
        ([("0", 4)], TypeError, "progress must be a number"),
        ([(False, 4)], TypeError, "progress must be a number"),
        ([(0, 4), (math.nan, 8)], TypeError, "progress must be a number"),
        ([(0, 4.0)], TypeError, "must be a whole number, but got 4.0"),
        ([(0, True)], TypeError, "must be a whole number, but got True"),
    ],
)
def test_a_ramp_that_makes_no_sense_is_refused(wrong: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        read_ramp(wrong)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True), st.integers(1, 99))
def test_batches_to_come_are_told_in_samples(tenths: list[int], done: int) -> None:
    """Of 1000 samples in two epochs, each part of a ramp begins at its own number of samples."""
    ramp = {0.0: 8, **{each / 10: 8 + each for each in tenths}}
    view = PolicyView(samples=10 * done, epochs=2, epoch=done // 50, epoch_progress=done % 50 / 50, batch_size=8)
    found = BatchSchedule(ramp, by="progress").coming_batches(view)
    expected = [(1000 * begin - 10 * done, size) for begin, size in sorted(ramp.items()) if round(100 * begin) > done]
    assert [size for _, size in found] == [size for _, size in expected]
    assert [ahead for ahead, _ in found] == pytest.approx([ahead for ahead, _ in expected])


def test_steps_and_tokens_to_come_are_told_in_samples() -> None:
    view = PolicyView(step=10, samples=80, batch_size=8, tokens_per_sample=16.0, max_batch_size=64)
    assert BatchSchedule({0: 8, 15: 16, 20: 32}).coming_batches(view) == [(40, 16)]
    schedule = BatchSchedule({0: 128, 3200: 512, 6400: 4096}, by="tokens")
    assert schedule.coming_batches(view) == [(120.0, 32), (320.0, 64)]
