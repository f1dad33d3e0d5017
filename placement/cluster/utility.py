"""Value of additional workers by the rules of Or, Zhang and Freedman (MLSys 2020, section 4.2).

The allocator, the autoscaler and the jobs' own policies all use these functions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from numpy.typing import NDArray

_FORM = "pairs of (seconds after submission, value [USD]), such as [(3600, 50), (7200, 0)]"
_STAYS = 0.05  # part of what the rest of a job costs that fewer workers must gain: lengths and speeds are estimates


@dataclasses.dataclass(frozen=True, slots=True)
class Utility:
    """Value of a job's completion as a function of the completion time.

    The function is piecewise linear. It is constant before the first point; after the last point, the last segment is
    extrapolated.
    """

    points: tuple[tuple[float, float], ...]  # (time [s], value [USD])

    def __post_init__(self) -> None:
        if not isinstance(self.points, (list, tuple)) or not all(_is_pair(each) for each in self.points):
            raise TypeError(f"utility must be {_FORM}, but got {self.points!r}")
        object.__setattr__(self, "points", tuple((float(time_s), float(value)) for time_s, value in self.points))
        if len(self.points) < 2 or not all(math.isfinite(each) for pair in self.points for each in pair):
            raise ValueError(f"utility must be two or more {_FORM}, all of them finite, but got {list(self.points)}")
        if self.points[0][0] < 0:
            raise ValueError(f"utility must have times of 0 s or more, but got {self.points[0][0]:g} s")
        for (before_s, old), (after_s, new) in itertools.pairwise(self.points):
            if after_s <= before_s:
                raise ValueError(f"utility must have rising times, but got {after_s:g} s after {before_s:g} s")
            if new > old:
                grows = f"{old:g} at {before_s:g} s and {new:g} at {after_s:g} s"
                raise ValueError(f"utility must never grow with time, but got {grows}")
        if self.points[-1][1] == self.points[0][1]:
            raise ValueError(f"utility must fall with time, else no hurry is worth a worker, but got {self.points}")

    def at(self, time_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the value of the job's completion [USD] for each of these completion times since submission [s]."""
        times, values = np.array(self.points).T
        slope = float((values[-1] - values[-2]) / (times[-1] - times[-2]))
        beyond = slope * np.maximum(time_s - times[-1], 0.0) if slope else 0.0
        found: NDArray[np.float64] = np.interp(time_s, times, values) + beyond
        return found

    def surplus(self, age_s: float, left_s: NDArray[np.float64], usd_per_h: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the value of completing the job in ``left_s`` [s], minus the workers' cost until then [USD].

            surplus = U(age + left) - price x left

        Changing to a size with a larger surplus pays off: its marginal utility exceeds its marginal cost.
        """
        runs = np.isfinite(left_s)
        some_s = np.where(runs, left_s, 0.0)
        return np.where(runs, self.at(age_s + some_s) - usd_per_h * some_s / 3600.0, -np.inf)

    def best_size(
        self, age_s: float, left_s: NDArray[np.float64], usd_per_h: NDArray[np.float64], least: int, present: int
    ) -> int:
        """Return the number of workers with the largest surplus, or the current number if it is about as good."""
        if len(left_s) < least:
            return least
        surplus = self.surplus(age_s, left_s, usd_per_h)
        best = least + int(np.argmax(surplus[least - 1 :]))
        if best < present <= len(left_s) and np.isfinite(surplus[present - 1]):
            spent = float(usd_per_h[present - 1] * left_s[present - 1]) / 3600.0
            return present if surplus[best - 1] - surplus[present - 1] <= _STAYS * spent else best
        return best


def _is_pair(each: object) -> bool:
    if not isinstance(each, (list, tuple)) or len(each) != 2:
        return False
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in each)


def scaling_efficiency(old: int, old_rate: float, new: int, new_rate: float) -> float:
    """Return s = ((R_new - R_old) / (new - old)) / (R_old / old): the throughput gained per added worker.

    The gain is relative to the throughput per worker at the smaller size.

    >>> scaling_efficiency(4, 400.0, 5, 480.0)
    0.8

    Returns 1 for perfect scaling, 0 if nothing is gained, and a negative number if throughput falls.
    """
    return (new_rate - old_rate) / (new - old) / (old_rate / old)


SCALING_THRESHOLD = 0.1
"""What one more worker must add at least, in workers: the default of the authors' code."""
