"""Recording of the core's events and decisions as lines of JSON, and their replay (pure).

A recording holds one or more lives of an allocator. A life starts with a line about the core's configuration, followed
by one line for each event and each decision, in order. The first line includes all default values, so that a replay
uses the values of that time even if defaults have changed since. Other lines omit fields that have their default value.
Numbers keep all digits, so that decisions in a replay are based on exactly the same values.
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
from placement.allocator.core import AllocatorCore
from placement.allocator.events import Event
from placement.allocator.snapshot import DecisionRecord
from placement.errors import InputError
from placement.goodput.fitting import Observation
from placement.goodput.forecast import BatchForecast
from placement.goodput.model import GoodputModel
from placement.knowledge.knowledge import Knowledge
from placement.policies import POLICIES, Policy

FORMAT = 1
_ENDLESS = 1_000_000_000

_EVENTS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Event)}
# Of the configuration; no core reads them.
_SHELLS_OWN = ("notices", "autoscaling", "dashboard", "metrics", "record", "storage", "orphan_timeout_s")
# Of annotations whose modules do not import them.
_LATE = {"Observation": Observation, "GoodputModel": GoodputModel, "BatchForecast": BatchForecast}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Recording of one life of an allocator: its policy, configuration, events and decisions."""

    policy: str
    settings: Mapping[str, Any]  # of the policy, by name
    config: AllocatorConfig  # of the core; what only the shell reads has its defaults
    settling: bool  # whether jobs ran before it was made
    events: tuple[tuple[float, Event], ...]  # what it was told, with the time of each [s since the epoch]
    decided: tuple[DecisionRecord, ...]
    # time of each event by the clock for intervals [s]; empty where that is the time of day
    steady_s: tuple[float, ...] = ()

    def make_policy(self) -> Policy:
        """Return a new instance of the recorded policy, in its initial state."""
        if self.policy not in POLICIES:  # a name in a file must not have us import whatever it names
            raise InputError(
                f"policy of a recording must be one of {', '.join(sorted(POLICIES))}, but got {self.policy!r}; "
                "give replay(policy=...) the policy that was recorded"
            )
        policy = POLICIES[self.policy]()
        if not self.settings:
            return policy
        try:
            return dataclasses.replace(policy, **self.settings)  # type: ignore[type-var]
        except (TypeError, ValueError) as error:
            raise InputError(f"settings of policy {self.policy!r} of a recording: {error}") from error


# -- writing -------------------------------------------------------------------------------------------------


def start_line(policy: Policy, config: AllocatorConfig | None, *, settling: bool) -> str:
    """Return the line that starts an allocator's recording; ``policy`` must not have made a decision yet."""
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
    """Recorder of a core's events and decisions as lines."""

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
    fields = dataclasses.fields(kind) if _is_dataclass(kind) else ()
    chosen = {field.name: getattr(policy, field.name) for field in fields if field.init}
    return {name: value for name, value in chosen.items() if isinstance(value, (bool, int, float, str))}


def _line(said: Mapping[str, Any]) -> str:
    return json.dumps(said, separators=(",", ":"), default=_number) + "\n"


def _number(value: Any) -> Any:
    """Convert NumPy numbers, which some fields hold, to Python numbers."""
    return value.item()


def _plain(kind: Any, value: Any, *, whole: bool = False) -> Any:
    """Return a value of this type for JSON; a dataclass with all fields or with those that differ from defaults."""
    if value is None:
        return None
    plain = functools.partial(_plain, whole=whole)
    if _is_dataclass(kind):
        said = [(field, hint, getattr(value, field.name)) for field, hint in _fields(kind)]
        return {field.name: plain(hint, each) for field, hint, each in said if whole or each != _default(field)}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return plain(_some(arguments), value)
    if origin is collections.abc.Mapping:
        return {key: plain(arguments[1], each) for key, each in value.items()}
    if origin is frozenset:
        return [plain(arguments[0], each) for each in sorted(value)]
    if origin is tuple:
        return [plain(hint, each) for hint, each in zip(_members(arguments, len(value)), value, strict=True)]
    return value.value if isinstance(value, enum.Enum) else value


# -- reading -------------------------------------------------------------------------------------------------


def read_recording(lines: Iterable[str]) -> tuple[Life, ...]:
    """Read the lives of a recording; an incomplete last line, left by an allocator that died, is ignored."""
    lives: list[tuple[dict[str, Any], list[tuple[float, float, Event]], list[DecisionRecord]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            said = json.loads(line)
            if "start" in said:
                lives.append((said["start"], [], []))
            elif "decided" in said:
                lives[-1][2].append(_built(DecisionRecord, said["decided"]))
            else:
                (kind,) = said.keys() - {"now_s", "steady_s"}
                now_s, steady_s = (_built(float, said.get(clock, said["now_s"])) for clock in ("now_s", "steady_s"))
                lives[-1][1].append((now_s, steady_s, _built(_EVENTS[kind], said[kind])))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise InputError(f"line {number} of the recording: {error!r}") from error
    try:
        return tuple(_life(*each) for each in lives)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"the start of a life in the recording: {error!r}") from error


def _life(start: dict[str, Any], events: list[tuple[float, float, Event]], decided: list[DecisionRecord]) -> Life:
    """Return a life from its first line and its events and decisions."""
    was_set = any(steady_s != now_s for now_s, steady_s, _ in events)
    if start["format"] != FORMAT:
        raise ValueError(f"format must be {FORMAT}, but got {start['format']!r}")
    return Life(
        policy=_built(str, start["policy"]),
        settings=_built(Mapping[str, Any], start["settings"]),
        config=_built(AllocatorConfig, start["config"]),
        settling=_built(bool, start["settling"]),
        events=tuple((now_s, event) for now_s, _, event in events),
        decided=tuple(decided),
        steady_s=tuple(steady_s for _, steady_s, _ in events) if was_set else (),
    )


def _built(kind: Any, plain: Any) -> Any:
    """Return a value of this type (inverse of ``_plain``); raise TypeError or ValueError if it is invalid."""
    if kind is Any:
        return plain
    if _is_dataclass(kind):
        return _object(kind, plain)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if plain is None else _built(_some(arguments), plain)
    if origin is typing.Literal:
        if plain not in arguments:
            raise ValueError(f"must be one of {arguments}, but got {plain!r}")
        return plain
    if origin is collections.abc.Mapping:
        return {key: _built(arguments[1], each) for key, each in _checked(plain, dict).items()}
    if origin is frozenset:
        return frozenset(_built(arguments[0], each) for each in _checked(plain, list))
    if origin is tuple:
        several = _checked(plain, list)
        return tuple(_built(hint, each) for hint, each in zip(_members(arguments, len(several)), several, strict=True))
    if issubclass(kind, enum.Enum):
        return kind(plain)
    # A whole number may stand for a float, and stays one: what it prints must not change.
    return _checked(plain, (int, float) if kind is float else kind)


def _object(kind: Any, plain: Any) -> Any:
    """Build a dataclass, passing arguments by position if its constructor gives them different names."""
    given = _checked(plain, dict)
    fields = _fields(kind)
    unknown = sorted(given.keys() - {field.name for field, _ in fields})
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}")
    values = {field.name: _built(hint, given[field.name]) for field, hint in fields if field.name in given}
    if kind is GoodputModel:
        return kind(*(values[field.name] for field, _ in fields))
    return kind(**values)


def _checked(plain: Any, kind: Any) -> Any:
    if not isinstance(plain, kind) or (isinstance(plain, bool) and kind is not bool):
        raise TypeError(f"must be {kind}, but got {plain!r:.80}")
    return plain


# -- types ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _fields(kind: Any) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    """Return the recorded fields of a dataclass, each with its type."""
    hints = typing.get_type_hints(kind, localns=_LATE)
    left_out = _SHELLS_OWN if kind is AllocatorConfig else ()
    return tuple((field, hints[field.name]) for field in dataclasses.fields(kind) if field.name not in left_out)


def _is_dataclass(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _some(arguments: tuple[Any, ...]) -> Any:
    (kind,) = (each for each in arguments if each is not types.NoneType)
    return kind


def _members(arguments: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Return the type of each member of a tuple; ``tuple[int, ...]`` is repeated ``count`` times."""
    return (arguments[0],) * count if len(arguments) == 2 and arguments[1] is ... else arguments


# -- replaying -----------------------------------------------------------------------------------------------


def replay(
    life: Life, *, policy: Policy | None = None, watch: Callable[[AllocatorCore, float], None] | None = None
) -> tuple[DecisionRecord, ...]:
    """Return the decision log of a new core that handles the same events; it should equal ``life.decided``.

    Args:
        policy: The recorded policy, required if the package does not include it; None creates it from the recording.
        watch: Function that is called with the core after each event.

    Raises InputError if the recording names a policy that the package does not include.
    """
    config = dataclasses.replace(life.config, log_length=_ENDLESS)  # decisions do not depend on how many are kept
    core = AllocatorCore(policy or life.make_policy(), config, settling=life.settling, knowledge=Knowledge())
    steady_s = life.steady_s or tuple(now_s for now_s, _ in life.events)
    for (now_s, event), interval_s in zip(life.events, steady_s, strict=True):
        core.handle(event, now_s, interval_s)
        if watch is not None:
            watch(core, now_s)
    return core.log


_STEP_S = 0.5  # that the two clocks differ by more between two readings only if the time of day was set


class SteadyClock:
    """Pair of clocks: the time of day for display and storage, and a steady clock for measuring intervals."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._last = wall(), monotonic()
        self._set_by_s = 0.0  # sum of all steps
        self._steady_s = self._last[0]

    def read(self) -> tuple[float, float]:
        """Return the wall-clock time, and the time of the steady clock, which never decreases [s]."""
        wall_s, monotonic_s = self._wall(), self._monotonic()
        step_s = (wall_s - self._last[0]) - (monotonic_s - self._last[1])
        if abs(step_s) > _STEP_S:
            self._set_by_s += step_s
        self._last = wall_s, monotonic_s
        self._steady_s = max(self._steady_s, wall_s - self._set_by_s)
        return wall_s, self._steady_s
