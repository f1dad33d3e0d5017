"""Checks of numbers given by users, with uniform error messages (pure)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def check_number(
    what: str,
    value: float,
    *,
    least: float | None = None,
    above: float | None = None,
    unit: str = "",
    finite: bool = False,
    error: type[ValueError] = ValueError,
) -> None:
    """Raise an error if a value is not a number, is NaN, or is outside its range; booleans do not count as numbers.

    Args:
        least: Inclusive lower bound; exactly one of ``least`` and ``above`` must be given.
        finite: True to reject infinity.

    Raises ValueError (or ``error``) if the number is invalid; the message gives the range and the value.
    """
    assert (least is None) != (above is None), "a range has one lower end"
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        inside = value >= least if least is not None else value > (above or 0.0)
        if inside and (not finite or is_finite(value)):
            return
    bound = f"{least:g}" if least is not None else f"above {above:g}"
    said = " ".join(filter(None, [bound, unit, "or more" if least is not None else ""]))
    raise error(f"{what} must be {said}, but got {value!r:.80}")


def is_finite(value: Any) -> bool:
    """True if a number is finite and within the range of a float, which whole numbers can exceed."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_kind(what: str, value: object, kind: Any, name: str, *, error: type[Exception] = TypeError) -> None:
    """Raise TypeError (or ``error``) unless the value has the type ``kind``, which ``name`` describes."""
    if not isinstance(value, kind):
        raise error(f"{what} must be {name}, but got {value!r:.80}")


def is_whole(value: object, least: int = 0) -> bool:
    """True if ``value`` is a whole number of at least ``least``; booleans do not count as numbers."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def check_whole(what: str, value: object, *, least: int = 0, error: type[ValueError] = ValueError) -> None:
    """Raise ValueError (or ``error``) unless the value is a whole number of at least ``least``."""
    if not is_whole(value, least):
        raise error(f"{what} must be a whole number, {least} or more, but got {value!r}")
