"""The way to a strategy: steps of the present one, trials of others, and one that is kept (pure).

A state machine on frozen states. It sees only numbers that are equal on all ranks, so all of them choose alike; it
comes to its end after a known number of steps.
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_ray.sync.spec import Strategy

DRIFT = 2.0
"""Factor by which touched rows change before the choice is made anew."""
# A trial of short steps, whose times scatter, continues for so long [s], with at most so many times the steps.
_TRIAL_S, _MOST_TRIAL_STEPS = 0.2, 2
_FINAL = 6  # trials of the present strategy and its best rival in turn


class Phase(str, enum.Enum):
    """Phase of a choice: profiling, trying, trying again, or kept."""

    PROFILING = "profiling"
    TRYING = "trying"
    RETRYING = "retrying"
    KEPT = "kept"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSettings:
    """Settings of a strategy choice: exactness, number and length of trials, and the required gain.

    Attributes:
        exact: only strategies whose step is that of plain data-parallel training.
        trials: strategies that are tried, besides the present one and plain all-reduce.
        trial_steps: steps of each, of which the first does not count; up to twice as many where they are short.
        gain: a strategy is left for another that is faster by more than this share.
    """

    exact: bool = True
    trials: int = 3
    trial_steps: int = 5
    gain: float = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A strategy that is considered.

    Attributes:
        measured_s: median of its trial's steps; None before.
        plain: it is what torch DDP does.
        present: it does what the strategy does that training came with.
    """

    strategy: Strategy
    measured_s: float | None = None
    plain: bool = False
    present: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one training step that all ranks agree on.

    Attributes:
        step_s: of the slowest rank; None where it was not measured.
        rows: that were touched of each table, on the rank with most; of tables whose rows travel.
    """

    step_s: float | None = None
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """State of the strategy choice for one topology.

    Attributes:
        strategy: to be in force.
        phase: what the next steps are for.
        times: steps of the present phase, or trial [s].
        present: the strategy that training came with, once it was measured.
        options: what is tried, in this order.
        trying: the one that is being tried.
        final: the present one and its best rival in turn: the medians of their steps [s].
        considered: names of all candidates.
        rows: touched rows of each table when it was chosen.
        reason: of the choice, a sentence; empty before.
    """

    strategy: Strategy
    phase: Phase = Phase.PROFILING
    times: tuple[float, ...] = ()
    present: Option | None = None
    options: tuple[Option, ...] = ()
    trying: int = 0
    final: tuple[float, ...] = ()
    considered: tuple[str, ...] = ()
    rows: tuple[tuple[str, int], ...] = ()
    reason: str = ""

    @property
    def settled(self) -> bool:
        """True once a strategy is kept."""
        return self.phase is Phase.KEPT

    def to_state(self) -> dict[str, Any]:
        """Return the choice as plain values; trials restart when it is restored."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return plain | {
            "strategy": self.strategy.to_json(),
            "phase": self.phase.value,
            "present": None if self.present is None else _option_state(self.present),
            "options": tuple(map(_option_state, self.options)),
        }

    @classmethod
    def from_state(cls, tree: Mapping[str, Any]) -> Choice:
        """The inverse of :meth:`to_state`."""
        given = {
            "strategy": Strategy.from_json(tree["strategy"]),
            "phase": Phase(tree["phase"]),
            "present": None if tree["present"] is None else _option(tree["present"]),
            "options": tuple(map(_option, tree["options"])),
        }
        return cls(**{**tree, **given})


Consider = Callable[[Mapping[str, int], Strategy], Sequence[Option]]
"""From touched rows and the present strategy to options in the order of trials, the present one among them."""


def begin(strategy: Strategy) -> Choice:
    """Return a new choice for an unknown topology; training starts with `strategy`."""
    return Choice(strategy=strategy)


def resume(choice: Choice) -> Choice:
    """The group was left and formed anew: what was measured of it stays, a trial in progress begins anew."""
    return dataclasses.replace(choice, times=())


def leave(choice: Choice) -> Strategy:
    """Return the strategy to continue with in an unknown group; a strategy on trial is not carried over."""
    if choice.phase in (Phase.TRYING, Phase.RETRYING) and choice.present is not None:
        return choice.present.strategy
    return choice.strategy


def advance(choice: Choice, measured: Measured, settings: ChoiceSettings, consider: Consider) -> Choice:
    """Return the choice after one more training step.

    Args:
        choice: before it.
        settings: how a choice is made.
        consider: lists what may be done.
    """
    match choice.phase:
        case Phase.PROFILING:
            choice = _timed(choice, measured)
            return _profiled(choice, settings, consider) if _is_over(choice.times, settings) else choice
        case Phase.TRYING:
            choice = _timed(choice, measured)
            return _tried(choice) if _is_over(choice.times, settings) else choice
        case Phase.RETRYING:
            choice = _timed(choice, measured)
            return _retried(choice, settings) if len(choice.times) >= settings.trial_steps else choice
        case Phase.KEPT:
            return choice


def watch_rows(choice: Choice, rows: Mapping[str, int]) -> Choice:
    """Choose anew where a table's touched rows are others by a factor of two than when it was chosen; none is news.

    Args:
        rows: of each table, equal on all ranks.
    """
    if choice.phase is not Phase.KEPT or not rows:
        return choice
    before = dict(choice.rows)
    if not before:
        return dataclasses.replace(choice, rows=tuple(sorted(rows.items())))
    drifted = [name for name, now in rows.items() if _drifted(before.get(name, now), now)]
    if not drifted:
        return choice
    return dataclasses.replace(
        choice, phase=Phase.PROFILING, times=(), options=(), present=None, rows=tuple(sorted(rows.items()))
    )


def _drifted(before: int, now: int) -> bool:
    low, high = sorted((max(1, before), max(1, now)))
    return high > DRIFT * low


def _timed(choice: Choice, measured: Measured) -> Choice:
    """Return the choice with the time of one more step of the present phase or trial."""
    if measured.step_s is None:
        return choice
    rows = dict(choice.rows)
    if choice.phase is Phase.PROFILING:
        rows |= {name: max(count, rows.get(name, 0) if choice.times else 0) for name, count in measured.rows.items()}
    return dataclasses.replace(choice, times=(*choice.times, measured.step_s), rows=tuple(sorted(rows.items())))


def _is_over(times: Sequence[float], settings: ChoiceSettings) -> bool:
    """True if a trial has enough steps and enough time."""
    enough = len(times) >= _MOST_TRIAL_STEPS * settings.trial_steps or sum(times[1:]) >= _TRIAL_S
    return len(times) >= settings.trial_steps and enough


def _median(times: Sequence[float]) -> float:
    """Return the median time of a trial's steps, without the first, which includes the cost of the change."""
    return statistics.median(times[1:] or times)


def _profiled(choice: Choice, settings: ChoiceSettings, consider: Consider) -> Choice:
    """The present strategy was measured: try the first of the others, and plain all-reduce."""
    options = consider(dict(choice.rows), choice.strategy)
    present = dataclasses.replace(next(each for each in options if each.present), measured_s=_median(choice.times))
    others = [each for each in options if not each.present]
    tried = (*others[: settings.trials], *(each for each in others[settings.trials :] if each.plain))
    considered = tuple(each.strategy.name for each in options)
    choice = dataclasses.replace(choice, present=present, options=tried, considered=considered, times=(), trying=0)
    if not tried:
        return _kept(choice, present, "no other sends as little")
    return dataclasses.replace(choice, phase=Phase.TRYING, strategy=tried[0].strategy)


def _tried(choice: Choice) -> Choice:
    """A trial has ended: continue with the next, or try the best once more against the present one.

    The present one was measured first, and the best is also the luckiest: both three times more, in turn.
    """
    measured = dataclasses.replace(choice.options[choice.trying], measured_s=_median(choice.times))
    options = (*choice.options[: choice.trying], measured, *choice.options[choice.trying + 1 :])
    choice = dataclasses.replace(choice, options=options, times=())
    after = choice.trying + 1
    if after < len(options):
        return dataclasses.replace(choice, trying=after, strategy=options[after].strategy)
    best, present = min(options, key=_seconds), choice.present
    assert present is not None
    if _seconds(best) >= _seconds(present):
        return _kept(choice, present, f"{_shown(best)} is the best of the others")
    return dataclasses.replace(choice, phase=Phase.RETRYING, strategy=present.strategy, final=())


def _retried(choice: Choice, settings: ChoiceSettings) -> Choice:
    """The present one, or its rival, was tried once more; in the end the rival is kept if it was faster each time."""
    best, before = min(choice.options, key=_seconds), choice.present
    assert before is not None
    final = (*choice.final, _median(choice.times))
    if len(final) < _FINAL:
        strategy = (before, best)[len(final) % 2].strategy
        return dataclasses.replace(choice, final=final, times=(), strategy=strategy)
    own, others = statistics.median(final[::2]), statistics.median(final[1::2])
    present, rival = dataclasses.replace(before, measured_s=own), dataclasses.replace(best, measured_s=others)
    options = tuple(rival if each is best else each for each in choice.options)
    choice = dataclasses.replace(choice, present=present, options=options, final=())
    always = all(other < mine for mine, other in zip(final[::2], final[1::2], strict=True))
    if always and others < (1.0 - settings.gain) * own:
        return _kept(choice, rival, f"{1.0 - others / own:.0%} less than {_shown(present)}")
    return _kept(choice, present, f"{_shown(rival)} is not faster by {settings.gain:.0%} each time")


def _kept(choice: Choice, option: Option, why: str) -> Choice:
    """The end: with the reason."""
    reason = f"{_shown(option)}: {why}; {len(choice.options) + 1} of {len(choice.considered)} were tried"
    return dataclasses.replace(choice, phase=Phase.KEPT, strategy=option.strategy, reason=reason, times=())


def _seconds(option: Option) -> float:
    assert option.measured_s is not None
    return option.measured_s


def _shown(option: Option) -> str:
    return f"{option.strategy.name or 'the given strategy'} ({_seconds(option) * 1e3:.3g} ms a step)"


def _option_state(option: Option) -> tuple[Any, ...]:
    return option.strategy.to_json(), option.measured_s, option.plain, option.present


def _option(row: Sequence[Any]) -> Option:
    return Option(strategy=Strategy.from_json(row[0]), measured_s=row[1], plain=row[2], present=row[3])
