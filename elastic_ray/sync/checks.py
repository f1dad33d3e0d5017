"""Checks of a strategy's fields, with uniform error messages (pure)."""

from __future__ import annotations

from typing import Any

from placement.checks import check_whole
from placement.unique_keys import load_json

# Far above what is of use: a strategy may come from a file of somebody else's.
_MOST_TEXT = 1 << 20


class StrategyError(ValueError):
    """Error raised if a strategy is invalid or cannot be used with this model, optimizer or group."""


def check_one_of(field: str, value: object, known: tuple[str, ...]) -> None:
    """Raise StrategyError, naming ``field``, if the value is not a known value."""
    if value not in known:
        raise StrategyError(f"{field} must be one of {', '.join(known)}, but got {value!r}")


def check_count(field: str, value: object, *, least: int, most: int) -> None:
    """Raise StrategyError, naming ``field``, if the value is not an integer from ``least`` to ``most``."""
    check_whole(field, value, least=least, error=StrategyError)
    if isinstance(value, int) and value > most:
        raise StrategyError(f"{field} must be a whole number, {most} or less, but got {value!r:.40}")


def check_range(field: str, value: object, *, above: float, up_to: float) -> None:
    """Raise StrategyError, naming ``field``, unless the value is above ``above`` and at most ``up_to``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= up_to:
        raise StrategyError(
            f"{field} must be a number above {max(0.0, above):g} and up to {up_to:g}, but got {value!r}"
        )


def check_flag(field: str, value: object) -> None:
    """Raise StrategyError, naming ``field``, if the value is not a bool."""
    if not isinstance(value, bool):
        raise StrategyError(f"{field} must be True or False, but got {value!r}")


def check_type(field: str, value: object, kind: Any) -> None:
    """Raise StrategyError, naming ``field``, if the value does not have the type ``kind``."""
    if not isinstance(value, kind):
        names = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise StrategyError(f"{field} must be a {names}, but got {value!r}")


def parse_json(text: str) -> Any:
    """Parse untrusted JSON text; raise StrategyError if it is invalid, too long, too deep or repeats a field."""
    if len(text) > _MOST_TEXT:
        raise StrategyError(f"a strategy's JSON must have at most {_MOST_TEXT} characters, but it has {len(text)}")
    try:
        return load_json(text)
    except ValueError as error:
        raise StrategyError(f"a strategy must be JSON as Strategy.to_json() writes it, but {error}") from None
