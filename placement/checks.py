"""Checks of numbers given by users, with uniform error messages (pure)."""

from __future__ import annotations

import math

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
    """Raise an error if a number is NaN or outside its range.

    Args:
        least: Inclusive lower bound; exactly one of ``least`` and ``above`` must be given.
        finite: True to reject infinity.

    Raises ValueError (or ``error``) if the number is invalid; the message gives the range and the value.
    """
    assert (least is None) != (above is None), "a range has one lower end"
    inside = value >= least if least is not None else value > (above or 0.0)
    if inside and (not finite or math.isfinite(value)):
        return
    bound = f"{least:g}" if least is not None else f"above {above:g}"
    said = " ".join(filter(None, [bound, unit, "or more" if least is not None else ""]))
    raise error(f"{what} must be {said}, but got {value}")


def is_whole(value: object, least: int = 0) -> bool:
    """True if ``value`` is a whole number of at least ``least``; booleans do not count as numbers."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def check_whole(what: str, value: object, *, least: int = 0, error: type[ValueError] = ValueError) -> None:
    """Raise ValueError (or ``error``) unless the value is a whole number of at least ``least``."""
    if not is_whole(value, least):
        raise error(f"{what} must be a whole number, {least} or more, but got {value!r}")
