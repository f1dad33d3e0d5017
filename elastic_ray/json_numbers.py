"""JSON for values that users supply: always valid, even with numbers that JSON cannot represent (pure).

NaN and the infinities are written as an object with one key, ``{"__float__": "NaN"}``, ``"Infinity"`` or
``"-Infinity"``, and read back as numbers. If a user's mapping has only that key, its value is wrapped in a list. Other
types that JSON lacks are written as a number if they are scalars, otherwise as their ``repr``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Made = TypeVar("_Made")
_KEY = "__float__"
_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dump(value: Any, *, other: Callable[[Any], Any] | None = None, sort_keys: bool = False) -> str:
    """Return a value as JSON text, with non-finite numbers marked so that :func:`load` restores them.

    Args:
        value: Plain values, possibly nested; other objects are converted by ``other``.
        other: Converts an object that JSON does not support to a plain value; ``plain`` by default.

    Raises TypeError, ValueError or RecursionError if a key is not text or a value contains itself.

    >>> dump({"loss": float("nan"), "step": 3})
    '{"loss": {"__float__": "NaN"}, "step": 3}'
    """
    return json.dumps(_marked(value, other or plain), sort_keys=sort_keys, allow_nan=False)


def load(text: str | bytes) -> Any:
    """Return the value of a JSON text written by ``dump``.

    >>> load('{"loss": {"__float__": "-Infinity"}}')
    {'loss': -inf}

    Raises ValueError if the text is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, object_hook=_unmarked)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def dumpable(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the metrics unchanged if :func:`dump` can write them; otherwise with text keys, and values as ``repr``."""
    try:
        dump(dict(metrics))
    except (TypeError, ValueError, RecursionError):  # keys that are no text, or a value that holds itself
        return {str(name): repr(value) for name, value in metrics.items()}
    return dict(metrics)


def known_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``values`` whose keys are fields of the dataclass ``kind`` in this release."""
    return {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}


def build(kind: type[_Made], values: Mapping[str, Any], what: str, /, **read: Any) -> _Made:
    """Build the dataclass ``kind`` from :func:`known_fields` and ``read``; raises ValueError if ``what`` lacks any."""
    try:
        return kind(**{**known_fields(kind, values), **read})
    except TypeError as error:
        raise ValueError(f"{what} lacks fields: {error}") from None


def plain(value: Any) -> Any:
    """Return a JSON value for an object that ``json`` does not support: a number for a scalar, else its ``repr``."""
    item = getattr(value, "item", None)
    if callable(item):
        with contextlib.suppress(Exception):
            return item()
    return repr(value)


def _marked(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return the value, replacing non-finite numbers and objects that JSON does not support."""
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
