"""Checks of numbers that users give: one wording for all errors (pure)."""

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
    """Refuse a number outside its range, and what is no number.

    Args:
        what: how the error calls it.
        least: it must be so much or more,
        above: or above this; one of the two is given.
        unit: of the number, such as ``seconds``.
        finite: whether infinity is refused.

    Raises ValueError: it is outside (or ``error``); the message says the range and the value.
    """
    assert (least is None) != (above is None), "a range has one lower end"
    inside = value >= least if least is not None else value > (above or 0.0)
    if inside and (not finite or math.isfinite(value)):
        return
    bound = f"{least:g}" if least is not None else f"above {above:g}"
    said = " ".join(filter(None, [bound, unit, "or more" if least is not None else ""]))
    raise error(f"{what} must be {said}, but got {value}")


def is_whole(value: object, least: int = 0) -> bool:
    """True if `value` is a whole number of at least `least`; truth values are not numbers."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def check_whole(what: str, value: object, *, least: int = 0, error: type[ValueError] = ValueError) -> None:
    """Refuse what is no whole number, or below ``least``. Raises ValueError: it is so (or ``error``)."""
    if not is_whole(value, least):
        raise error(f"{what} must be a whole number, {least} or more, but got {value!r}")
