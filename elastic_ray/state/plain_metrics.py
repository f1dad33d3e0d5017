"""Conversion of reported metrics to plain data of limited size, because other users' processes read it (pure)."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

MOST_CHARACTERS = 256 << 10
_DEEPEST = 20
_LARGEST_INT_BITS = 1024  # Python refuses to write down those of many thousand
_ITEM = 2  # a comma and a space, or brackets


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as numbers, strings, None, and lists, tuples and dicts of these, without subclasses.

    NumPy scalars, and arrays and tensors with one element, become Python numbers. Other arrays and tensors of real
    numbers become (nested) lists. The total size as JSON is limited to 256 KiB.

    Raises:
        TypeError: A value, or a key of a dict, has an unsupported type; the message names it.
        ValueError: The metrics are too large or too deeply nested, or contain themselves.
    """
    return _dict(metrics, "metrics", 0, _Budget())


@dataclasses.dataclass(slots=True)
class _Budget:
    left: int = MOST_CHARACTERS

    def spend(self, characters: int, value: Any, where: str) -> None:
        self.left -= characters + _ITEM
        if self.left < 0:
            raise ValueError(
                f"metrics must fit into {MOST_CHARACTERS >> 10} KiB of JSON all together, but {where}, {_type(value)}, "
                "exceeds that: report a summary, or write it into the checkpoint's directory"
            )


def _plain(value: Any, where: str, depth: int, budget: _Budget) -> Any:
    """Return the value as plain data; ``where`` names it in errors."""
    if depth > _DEEPEST:
        raise ValueError(
            f"metrics must not be nested deeper than {_DEEPEST} levels, but {where[:80]}... is, or it holds itself"
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return _leaf(value, where, budget)
    if isinstance(value, Mapping):
        return _dict(value, where, depth, budget)
    if isinstance(value, (list, tuple)):
        budget.spend(0, value, where)
        items = [_plain(item, f"{where}[{index}]", depth + 1, budget) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in "biuf":
        return _of_array(value, value.size, where, depth, budget)
    torch = sys.modules.get("torch")  # else there can be no tensor
    if torch is not None and isinstance(value, torch.Tensor) and not value.is_complex():
        return _of_array(value, value.numel(), where, depth, budget)
    raise TypeError(
        "metrics must be numbers, strings, None, arrays or tensors of real numbers, or lists, tuples and dicts of "
        f"these, but {where} is {_type(value)}: report a number of it, or its str()"
    )


def _leaf(value: Any, where: str, budget: _Budget) -> Any:
    """Return a leaf as a built-in type, because unpickling a subclass would import the user's code."""
    if value is None or isinstance(value, bool):
        budget.spend(5, value, where)
        return value
    if isinstance(value, float):
        budget.spend(len(float.__repr__(value)), value, where)
        return float.__float__(value)
    if isinstance(value, int):
        if int.bit_length(value) > _LARGEST_INT_BITS:
            raise ValueError(f"integers among metrics must be below 2**{_LARGEST_INT_BITS}, but {where} is larger")
        budget.spend(len(int.__repr__(value)), value, where)
        return int.__int__(value)
    text = str.__str__(value)
    if len(text) > budget.left:  # before it is looked through
        budget.spend(len(text), value, where)
    budget.spend(len(json.dumps(text)), value, where)
    return text


def _dict(value: Mapping[Any, Any], where: str, depth: int, budget: _Budget) -> dict[str, Any]:
    """Return a mapping as a plain dict."""
    budget.spend(0, value, where)
    found = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise TypeError(
                f"keys of metrics must be strings, but {where} has {key!r:.80}, {_type(key)}: use str() of it"
            )
        name = _leaf(key, where, budget)
        found[name] = _plain(item, f"{where}[{name[:80]!r}]", depth + 1, budget)
    return found


def _of_array(value: Any, size: int, where: str, depth: int, budget: _Budget) -> Any:
    if size > budget.left:  # before a list is made of it
        budget.spend(size, value, where)
    numbers = value.item() if size == 1 else value.tolist()
    # NumPy has a float that Python has not, and gives it as it is.
    return _plain(float(numbers) if isinstance(numbers, np.generic) else numbers, where, depth, budget)


def _type(value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a {module}{kind.__qualname__}"
