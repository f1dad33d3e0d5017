"""Label selectors in Ray's syntax: ``T4``, ``!T4``, ``in(T4,A100)``, ``!in(T4,A100)``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

_VALUE = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"  # as ray._private.label_utils has it
_CONDITION = re.compile(rf"(!?)(?:in\(({_VALUE}(?:, ?{_VALUE})*)\)|({_VALUE})|)")


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """True if a node with these labels satisfies a valid selector; ``!T4`` needs no label, as in Ray."""
    for label, condition in selector.items():
        negated, values = _parsed(condition)
        if (labels.get(label) in values) == negated:
            return False
    return True


def check_selector(selector: Mapping[Any, Any], what: str) -> None:
    """Raise an error for a selector that Ray would not accept.

    Args:
        what: Name of the selector in the error message, such as ``ScalingConfig(label_selector)``.
    """
    for label, condition in selector.items():
        if not isinstance(label, str) or not isinstance(condition, str):
            raise TypeError(f"{what} must map text to text, but got {dict(selector)!r}")
        if not label:
            raise ValueError(f"{what} must name labels, but got '' for {condition!r}")
        if condition == "!" or _CONDITION.fullmatch(condition) is None:
            raise ValueError(
                f"{what} must hold 'value', '!value', 'in(a,b)' or '!in(a,b)', each value of at most 63 letters, "
                f"digits and _.- that begins and ends with a letter or digit, but got {condition!r} for {label!r}"
            )


def satisfying(selector: Mapping[str, str]) -> dict[str, str]:
    """Return labels for an example node that satisfies the selector."""
    parsed = {label: _parsed(condition) for label, condition in selector.items()}
    return {label: min(values) for label, (negated, values) in parsed.items() if not negated}


@functools.lru_cache(maxsize=4096)
def _parsed(condition: str) -> tuple[bool, frozenset[str]]:
    """Return whether the condition is negated, and its values."""
    found = _CONDITION.fullmatch(condition)
    assert found is not None, f"{condition!r} was not checked"
    bang, several, single = found.groups()
    return bool(bang), frozenset(re.split(", ?", several)) if several else frozenset({single or ""})
