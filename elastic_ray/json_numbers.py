"""JSON of values that users give: valid whatever they hold, also numbers that JSON has no words for (pure).

NaN and the infinities are written as an object of one key, ``{"__float__": "NaN"}``, ``"Infinity"`` or ``"-Infinity"``,
and read back as the number; a mapping of the user's own with that one key has its value in a list. What JSON does not
know is written as a scalar's number, else as its ``repr``.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

_KEY = "__float__"
_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dump(value: Any, *, other: Callable[[Any], Any] | None = None, sort_keys: bool = False) -> str:
    """Return the JSON of a value.

    Args:
        value: of plain values; others go through ``other``.
        other: gives a plain value for one that JSON does not know; ``plain`` by default.
        sort_keys: as of ``json.dumps``.

    Raises TypeError, ValueError, RecursionError: keys that are no text, or a value that holds itself.

    >>> dump({"loss": float("nan"), "step": 3})
    '{"loss": {"__float__": "NaN"}, "step": 3}'
    """
    return json.dumps(_marked(value, other or plain), sort_keys=sort_keys, allow_nan=False)


def load(text: str | bytes) -> Any:
    """Return the value of a JSON text; the inverse of ``dump``.

    >>> load('{"loss": {"__float__": "-Infinity"}}')
    {'loss': -inf}
    """
    return json.loads(text, object_hook=_unmarked)


def plain(value: Any) -> Any:
    """Return a JSON value for what ``json`` does not know: a scalar's number, else text."""
    item = getattr(value, "item", None)
    if callable(item):
        with contextlib.suppress(Exception):
            return item()
    return repr(value)


def _marked(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return a value that JSON has words for."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return {_KEY: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        marked = {key: _marked(each, other) for key, each in value.items()}
        return {_KEY: [marked[_KEY]]} if [*marked] == [_KEY] else marked
    if isinstance(value, list | tuple):
        return [_marked(each, other) for each in value]
    known = other(value)
    return _marked(known, repr) if known is not value else repr(value)


def _unmarked(value: dict[str, Any]) -> Any:
    if [*value] != [_KEY]:
        return value
    only = value[_KEY]
    if isinstance(only, list) and len(only) == 1:
        return {_KEY: only[0]}
    return _NAMES.get(only, value) if isinstance(only, str) else value
