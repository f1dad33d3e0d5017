"""Reading and replay of what ``AllocatorConfig(record=...)`` has written."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import Event
from placement.allocator.recording import FORMAT, inner_type, is_dataclass, member_types, recorded_fields
from placement.allocator.snapshot import DecisionRecord
from placement.errors import InputError
from placement.goodput.model import GoodputModel
from placement.knowledge.knowledge import Knowledge
from placement.policies import POLICIES, Policy

_ENDLESS = 1_000_000_000

_EVENTS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Event)}
# Settings of older recordings that are constants now: with these values the core decides as it did.
_CONSTANT = {"settle_s": 1.5, "unsatisfiable_s": 3.0, "model_change": 0.1}


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
        """Return a new instance of the recorded policy, in its initial state.

        Raises:
            InputError: The package does not include the policy.
        """
        if self.policy not in POLICIES:  # a name in a file must not have us import whatever it names
            raise InputError(
                f"policy of a recording must be one of {', '.join(sorted(POLICIES))}, but got {self.policy!r}; "
                "give replay(policy=...) the policy that was recorded"
            )
        policy = POLICIES[self.policy]()
        if not self.settings:
            return policy
        try:
            return dataclasses.replace(policy, **self.settings)
        except (TypeError, ValueError) as error:
            raise InputError(f"settings of policy {self.policy!r} of a recording: {error}") from error


def read_recording(lines: Iterable[str]) -> tuple[Life, ...]:
    """Read the lives of a recording.

    An incomplete last line is ignored, since the allocator may have died while writing it.

    Raises InputError: a line is invalid; the message has its number.
    """
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
    """Return a life from its first line and its events and decisions.

    Raises KeyError, TypeError or ValueError if the first line is invalid.
    """
    was_set = any(steady_s != now_s for now_s, steady_s, _ in events)
    if start["format"] != FORMAT:
        raise ValueError(f"format must be {FORMAT}, but got {start['format']!r}")
    return Life(
        policy=_built(str, start["policy"]),
        settings=_built(Mapping[str, Any], start["settings"]),
        config=_built(AllocatorConfig, {k: v for k, v in start["config"].items() if _CONSTANT.get(k) != v}),
        settling=_built(bool, start["settling"]),
        events=tuple((now_s, event) for now_s, _, event in events),
        decided=tuple(decided),
        steady_s=tuple(steady_s for _, steady_s, _ in events) if was_set else (),
    )


def _built(kind: Any, plain: Any) -> Any:
    """Return a value of this type, the inverse of ``_plain``. Raise TypeError or ValueError if it is invalid."""
    if kind is Any:
        return plain
    if is_dataclass(kind):
        return _object(kind, plain)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if plain is None else _built(inner_type(arguments), plain)
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
        return tuple(
            _built(hint, each) for hint, each in zip(member_types(arguments, len(several)), several, strict=True)
        )
    if issubclass(kind, enum.Enum):
        return kind(plain)
    # A whole number may stand for a float, and stays one: what it prints must not change.
    return _checked(plain, (int, float) if kind is float else kind)


def _object(kind: Any, plain: Any) -> Any:
    """Build a dataclass; one whose constructor names its arguments differently gets them by position."""
    given = _checked(plain, dict)
    fields = recorded_fields(kind)
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


def replay(
    life: Life, *, policy: Policy | None = None, watch: Callable[[AllocatorCore, float], None] | None = None
) -> tuple[DecisionRecord, ...]:
    """Return the decision log of a new core that handles the same events; it should equal ``life.decided``.

    Args:
        policy: The recorded policy, required if the package does not include it; None creates it from the recording.
        watch: Function that is called with the core after each event.

    Raises InputError: the recording names a policy that the package does not include.
    """
    config = dataclasses.replace(life.config, log_length=_ENDLESS)  # decisions do not depend on how many are kept
    core = AllocatorCore(policy or life.make_policy(), config, settling=life.settling, knowledge=Knowledge())
    steady_s = life.steady_s or tuple(now_s for now_s, _ in life.events)
    for (now_s, event), interval_s in zip(life.events, steady_s, strict=True):
        core.handle(event, now_s, interval_s)
        if watch is not None:
            watch(core, now_s)
    return core.log
