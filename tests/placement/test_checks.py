"""What numbers are refused, and how that is said."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from placement.checks import check_choice, check_number, check_switch, check_whole, is_whole
from placement.errors import InputError


@pytest.mark.parametrize(
    ("value", "limits", "said"),
    [
        (-1, {"least": 0}, "x must be 0 or more, but got -1"),
        (0.0, {"above": 0, "unit": "seconds"}, "x must be above 0 seconds, but got 0.0"),
        (math.nan, {"least": 1, "unit": "sample"}, "x must be 1 sample or more, but got nan"),
        (math.inf, {"least": 0, "finite": True}, "x must be 0 or more and finite, but got inf"),
        (1.0, {"above": 1}, "x must be above 1, but got 1.0"),
        (1, {"least": 0, "below": 1}, "x must be 0 or more and below 1, but got 1"),
        (1.5, {"above": 0, "most": 1, "finite": True}, "x must be above 0 and at most 1, but got 1.5"),
        ("1", {"least": 0, "unit": "seconds"}, "x must be a number of seconds, but got '1'"),
        (True, {"least": 0}, "x must be a number, but got True"),
    ],
)
def test_numbers_outside_their_range_are_refused(value: object, limits: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        check_number("x", value, error=InputError, **limits)
    assert str(caught.value) == said


def test_the_ends_of_ranges_are_in_them_or_not() -> None:
    check_number("x", 0, least=0)
    check_number("x", math.inf, above=0)
    check_number("x", np.float32(1), most=1, below=2)
    assert [is_whole(each) for each in (0, 3, np.int64(2), -1, True, 1.0, "1", None)] == [True] * 3 + [False] * 5
    with pytest.raises(ValueError, match="x must be a whole number, 2 or more, but got 1"):
        check_whole("x", 1, least=2)
    check_whole("x", np.int64(-1), least=None)


def test_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="x must be a number, but got '1'"):
        check_number("x", "1")
    with pytest.raises(TypeError, match=r"x must be a whole number of steps, 0 or more, but got 1\.0"):
        check_whole("x", 1.0, unit="steps")
    with pytest.raises(TypeError, match="x must be True or False, but got 1"):
        check_switch("x", 1)
    with pytest.raises(ValueError, match="x must be one of a, b, but got 'c'"):
        check_choice("x", "c", ("a", "b"))
