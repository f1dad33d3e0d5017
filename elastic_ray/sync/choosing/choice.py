"""Choice of a strategy, by a race between candidates or from earlier jobs' measurements (pure).

The choice is a state machine with immutable states. Its inputs are the same on all ranks, so all ranks choose the same
strategy. It finishes after a known number of steps.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from elastic_ray.state.layout import digest
from elastic_ray.sync.spec import Strategy

Step = tuple[int, float | None]
"""A step of the race: whose it was, and its time [s]; None where it was not measured."""

# Steps of one that is left, in a round and in the last one: more tell nothing new.
_MOST_IN_ROUND, _MOST_IN_LAST = 8, 14
_FEWEST_IN_ROUND, _FEWEST_IN_LAST = 3, 4  # the first of them includes the cost of the change, and does not count
_ENOUGH_FOR_TWO = 6  # steps of one in a round that can be made in two turns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """State of a race between strategies: the candidate to run the next step, or the winner."""

    turn: int
    over: bool = False
    times: tuple[float | None, ...] = ()  # of each: the lower median of its steps [s]; None where none counts


def most_candidates(steps: int) -> int:
    """Return the maximum number of candidates that can race within ``steps`` steps; at least 2."""
    count = 2
    while _in_round(count + 1, steps) >= _FEWEST_IN_ROUND and _in_last(count + 1, steps) >= _FEWEST_IN_LAST:
        count += 1
    return count


def standing(history: Sequence[Step], count: int, steps: int) -> Standing:
    """Return the state of a race between `count` candidates after the steps made so far.

    Args:
        history: For each step so far, the index of the candidate that ran it and the step's duration [s] (None if
            unknown).
        steps: Maximum number of steps in the race.
    """
    times: list[list[float]] = [[] for _ in range(count)]
    left, done, before = list(range(count)), iter(history), -1
    while len(left) > 1:
        turns = _turns(left, count, steps)
        for turn in turns:
            step = next(done, None)
            if step is None:
                return Standing(turn=turn, times=_medians(times))
            took_s = step[1]
            if turn == before and took_s is not None:
                times[turn].append(took_s)
            before = turn
        medians = _medians(times)
        kept = sorted(left, key=lambda each: (medians[each] is None, medians[each] or 0.0))[: (len(left) + 1) // 2]
        left = [each for each in dict.fromkeys(reversed(turns)) if each in kept]
    return Standing(turn=left[0], over=True, times=_medians(times))


def _turns(left: Sequence[int], count: int, steps: int) -> list[int]:
    """Return the candidate for each step in a round; the last one to run goes first, if it is still in the race."""
    each = _in_round(count, steps)
    if len(left) > 2:  # there and back: the first steps of a training, or of a change, are slower than later ones
        there = each // 2 if each >= _ENOUGH_FOR_TWO else each
        back = [one for one in reversed(left) for _ in range(each - there)]
        return [one for one in left for _ in range(there)] + back
    half = _in_last(count, steps) // 2
    first, second = left
    return [first] * half + [second] * 2 * half + [first] * half


def _in_round(count: int, steps: int) -> int:
    """Return the number of steps for each candidate in any round except the last."""
    return min(_MOST_IN_ROUND, steps // sum(_sizes(count)))


def _in_last(count: int, steps: int) -> int:
    """Return the number of steps for each of the two finalists."""
    before = _in_round(count, steps) * (sum(_sizes(count)) - 2)
    return min(_MOST_IN_LAST, (steps - before) // 2)


def _sizes(count: int) -> Iterator[int]:
    """Yield the number of candidates in each round."""
    while count > 1:
        yield count
        count = (count + 1) // 2


def _medians(times: Sequence[Sequence[float]]) -> tuple[float | None, ...]:
    """Return each candidate's lower median step time; of two steps, that is the one with less disturbance."""
    return tuple(statistics.median_low(each) if each else None for each in times)


DRIFT = 2.0
"""Factor by which touched rows, or the time of a known strategy's steps, change before the choice is made anew."""
UNHEARD = -1
_CHECKED_STEPS = 5  # of a known strategy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one training step, the same on all ranks."""

    step_s: float | None = None  # of the slowest rank; None where it was not measured
    # that were touched of each table, on the rank with most; of tables whose rows travel
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # digest of the name of the strategy that earlier jobs found fastest; 0 for none, UNHEARD while that is not known
    known: int = 0
    known_s: float = 0.0  # a step under it, as they measured it [s]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """State of the automatic strategy choice, for groups with the same distribution of ranks over nodes."""

    strategy: Strategy  # to be in force
    settled: bool = False  # it is kept
    options: tuple[Strategy, ...] = ()  # those that race, the one that training came with first; none before
    steps: tuple[Step, ...] = ()  # of the race, or of a known strategy (number 0)
    times: tuple[float | None, ...] = ()  # of each option, once one is kept: the median of its steps [s]
    known_s: float | None = None  # time of a known strategy's steps, which is to be confirmed [s]
    doubts: bool = False  # what earlier jobs found does not hold here
    rows: tuple[tuple[str, int], ...] = ()  # touched rows of each table when it was chosen
    reason: str = ""  # of the choice, a sentence; empty before

    @property
    def measured(self) -> dict[str, float]:
        """Step times of the strategies measured in the race so far [s], keyed by strategy name."""
        found = zip(self.options, self.times, strict=False)
        return {option.name: took_s for option, took_s in found if took_s is not None}

    @property
    def measures(self) -> bool:
        """True while the choice needs the next steps to be measured."""
        return not self.settled or self.known_s is not None

    def to_state(self) -> dict[str, Any]:
        """Return the choice as plain values, for :meth:`from_state`."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return plain | {
            "strategy": self.strategy.to_json(),
            "options": tuple(option.to_json() for option in self.options),
        }

    @classmethod
    def from_state(cls, tree: Mapping[str, Any]) -> Choice:
        """Return the choice described by the plain values from :meth:`to_state`."""
        options = tuple(map(Strategy.from_json, tree["options"]))
        return cls(**{**tree, "strategy": Strategy.from_json(tree["strategy"]), "options": options})


Consider = Callable[[Mapping[str, int], Strategy], Sequence[Strategy]]
"""From touched rows and the present strategy to those that race, the present one first."""


def leave(choice: Choice) -> Strategy:
    """Return the strategy to continue with in a new group: the chosen strategy, not one that is still being tried."""
    return choice.strategy if choice.settled or not choice.options else choice.options[0]


def advance(choice: Choice, measured: Measured, steps: int, consider: Consider) -> Choice:
    """Return the choice after one more training step with the strategy that it currently names.

    Args:
        steps: Maximum number of steps in a race. ``measured`` is the step's measurement.
    """
    if choice.settled:
        return _confirmed(choice, measured) if choice.known_s is not None else choice
    begins = not choice.options
    if begins and measured.known == UNHEARD and not choice.doubts:
        return choice
    if begins:
        rows = dict(choice.rows) | dict(measured.rows)
        options = tuple(consider(rows, choice.strategy))
        choice = dataclasses.replace(choice, options=options, rows=tuple(sorted(rows.items())))
    known = next((each for each in choice.options if digest(each.name) == measured.known), None)
    if known is not None and measured.known_s > 0 and not choice.doubts:
        why = f"{known.label}: the fastest for earlier jobs of this model and form ({_ms(measured.known_s)})"
        return dataclasses.replace(
            choice, strategy=known, settled=True, steps=(), times=(), known_s=measured.known_s, reason=why
        )
    if not begins:
        at = choice.options.index(choice.strategy)
        choice = dataclasses.replace(choice, steps=(*choice.steps, (at, measured.step_s)))
    race = standing(choice.steps, len(choice.options), steps - 1)  # one has shown what is touched
    choice = dataclasses.replace(choice, strategy=choice.options[race.turn], times=race.times)
    return _kept(choice) if race.over else choice


def watch_rows(choice: Choice, rows: Mapping[str, int]) -> Choice:
    """Return the choice, reset if a table's number of touched rows has changed by more than a factor of two.

    Args:
        rows: Number of touched rows, keyed by table name and the same on all ranks; if empty, nothing changes.
    """
    if not choice.settled or not rows:
        return choice
    before = dict(choice.rows)
    if not before:
        return dataclasses.replace(choice, rows=tuple(sorted(rows.items())))
    if not any(_differ(before.get(name, now), now) for name, now in rows.items()):
        return choice
    return Choice(strategy=choice.strategy, doubts=True, rows=tuple(sorted(rows.items())))


def _differ(before: float, now: float) -> bool:
    """True if one value is more than twice the other."""
    low, high = sorted((before, now))
    return high > DRIFT * max(low, 1e-9)


def _confirmed(choice: Choice, measured: Measured) -> Choice:
    """Return the choice after a step with a known strategy: kept, or reset for a race if the step time differs."""
    assert choice.known_s is not None
    steps = (*choice.steps, (0, measured.step_s))
    if len(steps) < _CHECKED_STEPS:
        return dataclasses.replace(choice, steps=steps)
    times = [took_s for _, took_s in steps[1:] if took_s is not None]
    took_s = statistics.median_low(times) if times else choice.known_s
    if _differ(choice.known_s, took_s):
        return Choice(strategy=choice.strategy, doubts=True, rows=choice.rows)
    return dataclasses.replace(choice, known_s=None, steps=())


def _kept(choice: Choice) -> Choice:
    """Return the final choice and the reason for it."""
    measured = choice.measured
    others = {name: took_s for name, took_s in measured.items() if name != choice.strategy.name}
    reason = f"{choice.strategy.label}: no other sends as little"
    if others:
        best = min(others, key=lambda name: others[name])
        own = f" ({_ms(measured[choice.strategy.name])})" if choice.strategy.name in measured else ""
        reason = f"{choice.strategy.label}{own}: the fastest of {len(choice.options)}, after {len(choice.steps)} steps"
        reason += f"; next is {best} ({_ms(others[best])})"
    return dataclasses.replace(choice, settled=True, steps=(), reason=reason)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms a step"
