"""Or et al.'s search for a job's number of workers (MLSys 2020), and the utility of being done by some time (pure)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeSearch:
    """How the search goes.

    Attributes:
        fewest: smallest size [workers].
        most: largest size [workers].
        stride: workers added or removed at a time.
        passes_to_stay: so many smallest pairs of sizes must pass before smaller sizes are left untried.
        steps_to_stay: steps that a size needs to be rejected.
    """

    fewest: int
    most: int
    stride: int
    passes_to_stay: int
    steps_to_stay: int

    def next_size(self, measured: Mapping[int, int], passes: Callable[[int, int], bool]) -> int:
        """The size to go to, or to stay at.

        With one size measured, the next larger one, at the limit the next smaller one. While each pair of neighbouring
        sizes passes, a larger one. Otherwise, unless the first ``passes_to_stay`` pairs all pass, a smaller one. Where
        neither is left: the size before the first pair that does not pass, once the one after it has been measured
        for ``steps_to_stay`` steps; until then that one.

        Args:
            measured: sizes, one or more, with the steps that each was measured for.
            passes: whether it pays to go from a size to the next larger one of these.
        """
        sizes = sorted(measured)
        smallest, largest = sizes[0], sizes[-1]
        if len(sizes) == 1:
            return self._within(largest + self.stride if largest < self.most else largest - self.stride)
        results = [passes(old, new) for old, new in itertools.pairwise(sizes)]
        if all(results) and largest < self.most:
            return self._within(largest + self.stride)
        if results[: self.passes_to_stay] != [True] * self.passes_to_stay and smallest > self.fewest:
            return self._within(smallest - self.stride)
        if all(results):
            return largest
        first = results.index(False)
        enough = measured[sizes[first + 1]] >= self.steps_to_stay
        return sizes[first if enough else first + 1]

    def _within(self, size: int) -> int:
        return max(self.fewest, min(self.most, size))


def scaling_efficiency(old: int, old_rate: float, new: int, new_rate: float) -> float:
    """s = ((R_new - R_old) / (new - old)) / (R_old / old): what a worker more adds, in workers.

    >>> scaling_efficiency(4, 400.0, 5, 480.0)
    0.8

    Args:
        old: fewer workers.
        old_rate: their throughput R, in any unit.
        new: more workers.
        new_rate: their throughput.

    Returns:
        1 for perfect scaling, 0 where nothing is gained, negative where throughput falls.
    """
    return (new_rate - old_rate) / (new - old) / (old_rate / old)


def parse_utility(text: str) -> tuple[tuple[float, float], ...]:
    """A utility function as points (value [USD], time [s]), in Or et al.'s text forms.

    >>> parse_utility("10,3600")
    ((10.0, 0.0), (0.0, 3600.0))
    >>> parse_utility("50:100,0:300")
    ((50.0, 0.0), (50.0, 100.0), (0.0, 300.0))

    Args:
        text: ``"value at time 0,time of value 0"`` for a line, or ``"value:time,value:time"`` for points that lines
            connect; before the first point its value holds.

    Raises:
        ValueError: the text has another form, values rise, times do not, or the last line does not fall.
    """
    try:
        if ":" in text:
            pairs = [part.split(":") for part in text.split(",")]
            points = [(float(value), float(time_s)) for value, time_s in pairs]
            points = points if points[0][1] == 0 else [(points[0][0], 0.0), *points]
        else:
            height, end_s = text.split(",")
            points = [(float(height), 0.0), (0.0, float(end_s))]
    except ValueError:
        points = []
    lines = list(itertools.pairwise(points))
    falls = all(old[0] >= new[0] and old[1] < new[1] for old, new in lines)
    if not lines or not falls or lines[-1][0][0] <= lines[-1][1][0]:
        raise ValueError(
            "a utility must be 'USD at time 0,seconds until 0 USD' or 'USD:seconds,USD:seconds' with falling values, "
            f"rising times and a last line that falls, such as '50:3600,0:7200', but got {text!r}"
        )
    return tuple(points)


def utility_at(points: Sequence[tuple[float, float]], time_s: float) -> float:
    """The value of being done after ``time_s`` [s], negative beyond the last line's end."""
    lines = list(itertools.pairwise(points))
    (old, begin_s), (new, end_s) = next((line for line in lines if time_s < line[1][1]), lines[-1])
    return old + (new - old) * (time_s - begin_s) / (end_s - begin_s)
