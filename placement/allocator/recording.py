"""Recording of the core's events and decisions as lines of JSON (pure).

A recording holds one or more lives of an allocator. A life starts with a line about the core's configuration, followed
by one line for each event and each decision, in order. The first line includes all default values, so that a replay
uses the values of that time even if defaults have changed since. Other lines omit fields that have their default.
Numbers keep all digits, so that a replay decides on exactly the same values.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import json
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from placement.allocator.config import AllocatorConfig
from placement.allocator.events import Event
from placement.allocator.snapshot import DecisionRecord
from placement.goodput.fitting import Observation
from placement.goodput.forecast import BatchForecast
from placement.goodput.model import GoodputModel
from placement.policies import POLICIES, Policy

FORMAT = 1
# Of the configuration; no core reads them.
_SHELLS_OWN = ("notices", "autoscaling", "dashboard", "metrics", "record", "storage", "orphan_timeout_s")
# Of annotations whose modules do not import them.
_LATE = {"Observation": Observation, "GoodputModel": GoodputModel, "BatchForecast": BatchForecast}


# -- writing -------------------------------------------------------------------------------------------------


def start_line(policy: Policy, config: AllocatorConfig | None, *, settling: bool) -> str:
    """Return the line that starts the recording of an allocator; ``policy`` must not have made a decision yet."""
    core = config or AllocatorConfig()
    known = type(policy) in {type(make()) for make in POLICIES.values()}
    said = {
        "format": FORMAT,
        "policy": policy.name if known else f"{policy.name} (of the user's own)",
        "settings": _settings(policy) if known else {},
        "config": _plain(AllocatorConfig, core, whole=True),
        "settling": settling,
    }
    return _line({"start": said})


def event_line(event: Event, now_s: float, steady_s: float | None = None) -> str:
    """Return the line for an event; ``steady_s`` (clock for intervals) is omitted if it equals ``now_s``."""
    kind = type(event)
    steady = {} if steady_s in (None, now_s) else {"steady_s": steady_s}
    return _line({"now_s": now_s, **steady, kind.__name__: _plain(kind, event)})


def decision_line(record: DecisionRecord) -> str:
    """Return the recording's line for a decision."""
    return _line({"decided": _plain(DecisionRecord, record)})


class Recorder:
    """Recorder of a core's events and decisions as lines.

    Args:
        write: Function that writes lines; None records nothing.
    """

    def __init__(self, write: Callable[[Iterable[str]], None] | None) -> None:
        self._write = write

    def begun(self, policy: Policy, config: AllocatorConfig | None, *, settling: bool) -> None:
        """Record the start of an allocator core with these arguments."""
        if self._write is not None:
            self._write([start_line(policy, config, settling=settling)])

    def told(self, event: Event, now_s: float, steady_s: float | None = None) -> None:
        """Record an event with both times passed to ``AllocatorCore.handle``; call this before the core handles it."""
        if self._write is not None:
            self._write([event_line(event, now_s, steady_s)])

    def decided(self, records: Iterable[DecisionRecord]) -> None:
        """Record decisions made by the core."""
        if self._write is not None:
            self._write(map(decision_line, records))


def _settings(policy: Policy) -> dict[str, Any]:
    """Return the settings of a policy included in the package: numbers, names and booleans."""
    kind: Any = type(policy)
    fields = dataclasses.fields(kind) if is_dataclass(kind) else ()
    chosen = {field.name: getattr(policy, field.name) for field in fields if field.init}
    return {name: value for name, value in chosen.items() if isinstance(value, (bool, int, float, str))}


def _line(said: Mapping[str, Any]) -> str:
    return json.dumps(said, separators=(",", ":"), default=_number) + "\n"


def _number(value: Any) -> Any:
    """Convert NumPy numbers, which some fields hold, to Python numbers."""
    return value.item()


def _plain(kind: Any, value: Any, *, whole: bool = False) -> Any:
    """Return a value of this type in a form that JSON can store.

    A dataclass becomes a mapping of all fields, or only of those that differ from their defaults.
    """
    if value is None:
        return None
    plain = functools.partial(_plain, whole=whole)
    if is_dataclass(kind):
        said = [(field, hint, getattr(value, field.name)) for field, hint in recorded_fields(kind)]
        return {field.name: plain(hint, each) for field, hint, each in said if whole or each != _default(field)}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return plain(inner_type(arguments), value)
    if origin is collections.abc.Mapping:
        return {key: plain(arguments[1], each) for key, each in value.items()}
    if origin is frozenset:
        return [plain(arguments[0], each) for each in sorted(value)]
    if origin is tuple:
        return [plain(hint, each) for hint, each in zip(member_types(arguments, len(value)), value, strict=True)]
    return value.value if isinstance(value, enum.Enum) else value


# -- types ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def recorded_fields(kind: Any) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """Return the recorded fields of a dataclass, each with its type."""
    hints = typing.get_type_hints(kind, localns=_LATE)
    left_out = _SHELLS_OWN if kind is AllocatorConfig else ()
    return tuple((field, hints[field.name]) for field in dataclasses.fields(kind) if field.name not in left_out)


def is_dataclass(kind: Any) -> bool:
    """Return ``dataclasses.is_dataclass(kind)`` without narrowing the type of ``kind``."""
    return dataclasses.is_dataclass(kind)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def inner_type(arguments: tuple[Any, ...]) -> Any:
    """Return the type other than None in ``arguments``, the arguments of a ``type | None``."""
    (kind,) = (each for each in arguments if each is not types.NoneType)
    return kind


def member_types(arguments: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Return the type of each of a tuple's ``count`` members, given the arguments of ``tuple[...]``."""
    return (arguments[0],) * count if len(arguments) == 2 and arguments[1] is ... else arguments


_STEP_S = 0.5  # that the two clocks differ by more between two readings only if the time of day was set


class SteadyClock:
    """Pair of clocks: the time of day for display and storage, and a steady clock for measuring intervals.

    Both are in seconds since the epoch, and equal until the time of day is adjusted for the first time.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._last = wall(), monotonic()
        self._set_by_s = 0.0  # sum of all steps
        self._steady_s = self._last[0]

    def read(self) -> tuple[float, float]:
        """Return the time of day, and the time of the steady clock, which never decreases [s]."""
        wall_s, monotonic_s = self._wall(), self._monotonic()
        step_s = (wall_s - self._last[0]) - (monotonic_s - self._last[1])
        if abs(step_s) > _STEP_S:
            self._set_by_s += step_s
        self._last = wall_s, monotonic_s
        self._steady_s = max(self._steady_s, wall_s - self._set_by_s)
        return wall_s, self._steady_s
