"""The time of day, and a clock that goes on evenly when somebody sets it."""

from __future__ import annotations

import time
from collections.abc import Callable

_STEP_S = 0.5  # that the two clocks differ by more between two readings only if the time of day was set


class SteadyClock:
    """The time of day for what is shown and stored, and one for intervals that knows no steps.

    Both are seconds since the epoch, and the same until the time of day is set for the first time.

    Args:
        wall: the time of day [s since the epoch].
        monotonic: a clock that nobody sets [s].
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._last = wall(), monotonic()
        self._set_by_s = 0.0  # sum of all steps
        self._steady_s = self._last[0]

    def read(self) -> tuple[float, float]:
        """Return the time of day, and the time for intervals, which never decreases [s]."""
        wall_s, monotonic_s = self._wall(), self._monotonic()
        step_s = (wall_s - self._last[0]) - (monotonic_s - self._last[1])
        if abs(step_s) > _STEP_S:
            self._set_by_s += step_s
        self._last = wall_s, monotonic_s
        self._steady_s = max(self._steady_s, wall_s - self._set_by_s)
        return wall_s, self._steady_s
