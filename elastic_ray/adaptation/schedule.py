"""Schedules as text, in KungFu's form (pure)."""

from __future__ import annotations


def parse_schedule(text: str) -> tuple[tuple[int, float], ...]:
    """KungFu's ``"value:length,value:length"``: values that hold one after the other, each for some length.

    >>> parse_schedule("10:2,100:4")
    ((10, 2.0), (100, 4.0))

    Returns:
        The values with their lengths, in order.

    Raises:
        ValueError: it has another form, or a value is below 1 or a length not above 0.
    """
    try:
        pairs = [part.split(":") for part in text.split(",") if part.strip()]
        found = tuple((int(value), float(length)) for value, length in pairs)
    except ValueError:
        found = ()
    if not found or any(value < 1 or not length > 0 for value, length in found):
        raise ValueError(
            f"a schedule must be 'value:length,value:length', with whole values of 1 or more and lengths above 0, such "
            f"as '10:2,100:4' (10 for two steps, then 100 for four), but got {text!r}"
        )
    return found
