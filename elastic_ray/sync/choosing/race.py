"""Race of candidates over real training steps by successive halving (pure).

Karnin, Koren and Somekh, ICML 2013: all that are left take a few steps each, the slower half leaves, until one is left.
Rounds go to and fro and the last two take turns, so that a machine that becomes slower slows all of them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

Step = tuple[int, float | None]
"""A step of the race: whose it was, and its time [s]; None where it was not measured."""

# Steps of one that is left, in a round and in the last one: more tell nothing new.
_MOST_IN_ROUND, _MOST_IN_LAST = 8, 14
_FEWEST_IN_ROUND, _FEWEST_IN_LAST = 3, 4  # the first of them includes the cost of the change, and does not count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Standing of a race: whose step comes next, or who has won."""

    turn: int
    over: bool = False
    times: tuple[float | None, ...] = ()  # of each: the lower median of its steps [s]; None where none counts


def most_candidates(steps: int) -> int:
    """Return how many can race in `steps` steps, two or more."""
    count = 2
    while _in_round(count + 1, steps) >= _FEWEST_IN_ROUND and _in_last(count + 1, steps) >= _FEWEST_IN_LAST:
        count += 1
    return count


def standing(history: Sequence[Step], count: int, steps: int) -> Standing:
    """Return the standing of `count` candidates after the steps so far; each was the turn of who had it.

    Args:
        steps: that the race takes at most.
    """
    times: list[list[float]] = [[] for _ in range(count)]
    left, done, before = list(range(count)), iter(history), -1
    while len(left) > 1:
        for turn in _turns(left, count, steps):
            step = next(done, None)
            if step is None:
                return Standing(turn=turn, times=_medians(times))
            took_s = step[1]
            if turn == before and took_s is not None:
                times[turn].append(took_s)
            before = turn
        medians = _medians(times)
        kept = sorted(left, key=lambda each: (medians[each] is None, medians[each] or 0.0))[: (len(left) + 1) // 2]
        left = [each for each in reversed(left) if each in kept]
    return Standing(turn=left[0], over=True, times=_medians(times))


def _turns(left: Sequence[int], count: int, steps: int) -> list[int]:
    """Return whose steps a round consists of. Who had the last step of the round before is first, if it is left."""
    each = _in_round(count, steps)
    if len(left) > 2:
        return [one for one in left for _ in range(each)]
    half = _in_last(count, steps) // 2
    first, second = left
    return [first] * half + [second] * 2 * half + [first] * half


def _in_round(count: int, steps: int) -> int:
    """Return the steps of each candidate in a round but the last."""
    return min(_MOST_IN_ROUND, steps // sum(_sizes(count)))


def _in_last(count: int, steps: int) -> int:
    """Return the steps of each of the last two."""
    before = _in_round(count, steps) * (sum(_sizes(count)) - 2)
    return min(_MOST_IN_LAST, (steps - before) // 2)


def _sizes(count: int) -> Iterator[int]:
    """Yield how many are left in each round."""
    while count > 1:
        yield count
        count = (count + 1) // 2


def _medians(times: Sequence[Sequence[float]]) -> tuple[float | None, ...]:
    """Return the lower median of each: of two steps the one that nothing else has made longer."""
    return tuple(statistics.median_low(each) if each else None for each in times)
