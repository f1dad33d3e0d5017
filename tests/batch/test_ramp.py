"""Batch sizes that are declared by progress: what is read, and what is refused (pure)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic_ray.batch.ramp import read_ramp


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
