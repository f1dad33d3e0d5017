"""Checks of values given by users, with uniform error messages (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

_NUMBERS = (int, float, np.integer, np.floating)
_PLAIN = (float, int)  # looked at first, as thousands of views are made in a decision


def check_number(
    what: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    unit: str = "",
    finite: bool = False,
    error: type[ValueError] | None = None,
) -> None:
    """Raise an error unless a value is a number within a range.

    Args:
        least, above: Lower bound, inclusive or exclusive; None for no bound.
        most, below: Upper bound, inclusive or exclusive; None for no bound.
        finite: True to reject infinity; NaN is outside any range.

    Raises TypeError if the value is no number, and ValueError if it is outside the range, or ``error`` in both cases;
    the message gives the range and the value.
    """
    number: Any = value
    if type(value) not in _PLAIN and (isinstance(value, bool) or not isinstance(value, _NUMBERS)):
        raise (error or TypeError)(f"{what} must be a number{unit and f' of {unit}'}, but got {value!r:.80}")
    low = (least is None or number >= least) and (above is None or number > above)
    high = (most is None or number <= most) and (below is None or number < below)
    if low and high and (not finite or is_finite(number)):
        return
    said = [f"above {above:g} {unit}".strip()] if above is not None else []
    said += [" ".join(filter(None, (f"{least:g}", unit, "or more")))] if least is not None else []
    said += [f"at most {most:g}"] if most is not None else []
    said += [f"below {below:g}"] if below is not None else []
    said += ["finite"] if finite and most is None and below is None else []
    raise (error or ValueError)(f"{what} must be {' and '.join(said)}, but got {value!s:.80}")


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
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)


def check_whole(
    what: str, value: object, *, least: int | None = 0, unit: str = "", error: type[ValueError] | None = None
) -> None:
    """Raise an error unless a value is a whole number of at least ``least``; None for no bound.

    Raises TypeError if the value is no whole number, and ValueError if it is too small, or ``error`` in both cases.
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if least is None or value >= least:
            return
        kind: type[Exception] = error or ValueError
    else:
        kind = error or TypeError
    bound = f", {least} or more" if least is not None else ""
    raise kind(f"{what} must be a whole number{unit and f' of {unit}'}{bound}, but got {value!r:.80}")


def plain_numbers(config: Any) -> None:
    """Replace NumPy's numbers in a frozen dataclass, which the checks accept, with Python's, which JSON can hold."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if (plain := plain_number(value)) is not value:
            object.__setattr__(config, field.name, plain)


def plain_number(value: Any) -> Any:
    """Return a NumPy number as Python's, also within tuples and mappings; any other value unchanged."""
    if isinstance(value, np.integer | np.floating):
        return value.item()
    if type(value) is tuple:
        return tuple(map(plain_number, value))
    if isinstance(value, Mapping) and any(isinstance(each, np.generic) for each in value.values()):
        return {key: plain_number(each) for key, each in value.items()}
    return value


def check_switch(what: str, value: object) -> None:
    """Raise TypeError unless the value is True or False."""
    check_kind(what, value, bool, "True or False")


def check_choice(what: str, value: object, known: Collection[object]) -> None:
    """Raise ValueError unless the value is one of the ``known`` ones."""
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(map(str, known))}, but got {value!r}")
