"""Conversion of the page's snapshot to JSON, and the difference between two snapshots (pure)."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Mapping
from typing import Any

from elastic_ray.observe.page.model import PageSnapshot

KEYS: Mapping[str, str | int] = {
    "jobs": "job",
    "nodes": "node",
    "decisions": "number",
    "tenants": "tenant",
    "wanted": "type",
    "bars": 0,
    "marks": 0,
    "use": 0,
}
"""Tables of the snapshot, and what tells their rows apart: a field, or the place in an array."""

_AS_THEY_ARE = frozenset((str, int, bool))
_BIG = 1e5  # above: seconds since the epoch, of which hundredths count


def tables(snapshot: PageSnapshot) -> dict[str, Any]:
    """Return the fields of a page's snapshot as values that JSON can hold, keyed by field name."""
    return {name: plain(getattr(snapshot, name)) for name in _names(PageSnapshot)}


def plain(value: Any) -> Any:
    """Return a value as plain JSON: numbers with five digits, times with two decimals, None for NaN and infinity."""
    kind = value.__class__
    if value is None or kind in _AS_THEY_ARE:
        return value
    if kind is float:
        return _rounded(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _names(value.__class__)}
    try:
        return _rounded(float(value))  # of NumPy or torch
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return str(value)


def _rounded(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return round(value, 2) if abs(value) >= _BIG else float(f"{value:.5g}")


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes from one result of :func:`tables` to the next, keyed by field; empty if only time passed.

    A changed table is ``{"set": [new or changed rows], "remove": [keys]}``; any other entry is its new value.
    """
    changed: dict[str, Any] = {}
    for name, value in after.items():
        if name == "time_s" or value == before.get(name):
            continue
        key = KEYS.get(name)
        if key is None:
            changed[name] = value
            continue
        old = {row[key]: row for row in before.get(name, ())}
        new = {row[key]: row for row in value}
        changed[name] = {
            "set": [row for each, row in new.items() if old.get(each) != row],
            "remove": [each for each in old if each not in new],
        }
    return changed


def to_json(value: Any) -> bytes:
    """Return ``value`` as compact ASCII JSON, in which no character can break a line of an event stream."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
