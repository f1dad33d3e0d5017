"""Metrics that policies watch: rank 0's latest ones ride on the control sums (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


class WatchedMetrics:
    """A part of the control sums; see the module's text.

    Attributes:
        latest: what all ranks know rank 0 to have reported last, by name.
        reports: how many reports that stands for.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._own: dict[str, float] = {}
        self._own_reports = 0
        self.latest: dict[str, float] = {}
        self.reports = 0

    def watch(self, names: Sequence[str]) -> None:
        """These metrics as well; before the first epoch, on all ranks alike."""
        self._names = tuple(sorted({*self._names, *names}))

    def restore(self, latest: Mapping[str, float], reports: int) -> None:
        """What another rank, or a checkpoint, knows."""
        self.latest, self.reports = dict(latest), reports

    def reported(self, metrics: Mapping[str, Any], number: int) -> None:
        """This rank has reported, for the ``number``-th time in the run."""
        numbers = {name: metrics.get(name) for name in self._names}
        self._own = {
            name: float(value)
            for name, value in numbers.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        self._own_reports = number

    def begin(self) -> None:
        """A group was entered."""

    def size(self, world_size: int) -> int:
        """Values that ride along."""
        return 1 + 2 * len(self._names) if self._names else 0

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """Rank 0's latest report; zeros from the others."""
        if not self._names:
            return ()
        if rank != 0 or self._own_reports <= self.reports:
            return [0.0] * self.size(world_size)
        pairs = [(1.0, self._own[name]) if name in self._own else (0.0, 0.0) for name in self._names]
        return [float(self._own_reports), *(value for pair in pairs for value in pair)]

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """What rank 0 gave."""
        if self._names and sums[0] > 0:
            self.reports = round(sums[0])
            pairs = zip(self._names, sums[1::2], sums[2::2], strict=True)
            self.latest = {name: value for name, there, value in pairs if there > 0 and not math.isnan(value)}
