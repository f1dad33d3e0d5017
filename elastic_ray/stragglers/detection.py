"""Detection of slow ranks from their step times (pure).

Only additions, multiplications, divisions and comparisons are used, which IEEE 754 fixes to the last bit, so that ranks
on machines of different kinds come to the same verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

THRESHOLD = 0.8
"""Speed of a straggler over the median's (Or, Zhang and Freedman, MLSys 2020)."""

RECOVERED = 0.9
"""Speed over the median's from which a worker is no straggler any more."""

MIN_STEPS = 10
"""Steps before a verdict."""

_ALPHA = 0.1  # Or et al.
_WARM_UP = 2  # steps that pay for caches and for loaders that fetch anew
_MOST_TIMES = 4.0  # the median: longer times count as that long in averages
_RECENT = (1 << 10) - 1
_SLOW_STEPS = 7  # of the last ten
_LAST = 5  # steps; of one that has just become slow they show by how much, while averages still rise
# An average over steps has sqrt(alpha / (2 - alpha)) = 0.23 of their deviation, and a difference of two 0.32. The least
# deviation of two ranks is about half a standard deviation, so this makes four to five standard deviations.
_SIGNIFICANT = 3.0


def lower_median(values: Sequence[float]) -> float:
    """The middle value; of an even number the smaller one of the two, so that it is one of the values."""
    return sorted(values)[(len(values) - 1) // 2]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTrace:
    """Moving averages of what the ranks of one group take for their steps, since its members or shares have changed.

    A rank's time t is compared with the median's as it would be for as much work. Steps have a part that does not grow
    with their work, of unknown size, so that of a healthy rank with q times the median's work only this is known:
    t <= max(1, q) x the median's t. Times are divided by that bound: unequal work alone never makes a rank slow.

    Attributes:
        skipped: steps that were left out at the beginning.
        steps: steps that count.
        busy: average time of each rank over the mean of all ranks in the same step.
        data: the part of it that is waiting for data.
        deviation: average over steps of the ranks' median distance from their averages.
        recent: for each rank, which of the last ten steps were slow, one bit a step.
        last: times of the ranks in the last five steps, each over the mean of all.
    """

    skipped: int = 0
    steps: int = 0
    busy: tuple[float, ...] = ()
    data: tuple[float, ...] = ()
    deviation: float = 0.0
    recent: tuple[int, ...] = ()
    last: tuple[tuple[float, ...], ...] = ()

    def add(
        self, *, work: Sequence[float], busy_s: Sequence[float], data_s: Sequence[float], among: Sequence[int]
    ) -> SpeedTrace:
        """The trace after one more step.

        Args:
            work: samples (or tokens) of each rank, above 0; a step in which a rank has none does not count.
            busy_s: time of each rank from the step's beginning to its complete gradients [s].
            data_s: the part of it that was waiting for data [s].
            among: ranks that are not known to be slow, with whose work that of all is compared.
        """
        if min(work) <= 0 or min(busy_s) <= 0:
            return self
        if self.skipped < _WARM_UP:
            return dataclasses.replace(self, skipped=self.skipped + 1)
        usual = lower_median([work[rank] for rank in among])
        scale = [max(1.0, own / usual) for own in work]
        times = [busy / by for busy, by in zip(busy_s, scale, strict=True)]
        middle = lower_median(times)
        capped = [min(time, _MOST_TIMES * middle) for time in times]
        mean = sum(capped) / len(capped)
        now = [time / mean for time in capped]
        waits = [min(wait / by, time) / mean for wait, by, time in zip(data_s, scale, capped, strict=True)]
        slow = [int(THRESHOLD * time > middle) for time in times]
        slow_steps = self.recent or (0,) * len(slow)
        part = max(_ALPHA, 1.0 / (self.steps + 1))
        before = self.busy or now
        distance = lower_median([abs(new - old) for new, old in zip(now, before, strict=True)])
        return SpeedTrace(
            skipped=self.skipped,
            steps=self.steps + 1,
            busy=_moved(before, now, part),
            data=_moved(self.data or waits, waits, part),
            deviation=self.deviation + max(_ALPHA, 1.0 / max(1, self.steps)) * (distance - self.deviation),
            recent=tuple((old << 1 | new) & _RECENT for old, new in zip(slow_steps, slow, strict=True)),
            last=(*self.last[1 - _LAST :], tuple(time / mean for time in times)),
        )

    def to_state(self) -> dict[str, Any]:
        """Plain values, for :meth:`from_state`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, tree: Mapping[str, Any]) -> SpeedTrace:
        """The inverse of :meth:`to_state`, of which tuples may have become lists."""
        per_rank = {name: tuple(tree[name]) for name in ("busy", "data", "recent")}
        last = tuple(tuple(row) for row in tree["last"])
        return cls(skipped=tree["skipped"], steps=tree["steps"], deviation=tree["deviation"], last=last, **per_rank)

    @property
    def ready(self) -> bool:
        """True once there are enough steps for a verdict."""
        return self.steps >= MIN_STEPS

    def ratio(self, rank: int, among: Sequence[int]) -> float:
        """A rank's time over the median of the ranks ``among``; 1 before anything is known."""
        return self.busy[rank] / self._usual(among) if self.steps else 1.0

    def last_ratio(self, rank: int, among: Sequence[int]) -> float:
        """Return the rank's time over the median of `among`, in the last five steps only."""
        middle = [lower_median(times) for times in zip(*self.last, strict=True)]
        return middle[rank] / lower_median([middle[other] for other in among])

    def slow(self, rank: int, among: Sequence[int]) -> bool:
        """True if the rank is a straggler: on average, in most of the last steps, and beyond what noise explains."""
        if not self.ready or self.recent[rank].bit_count() < _SLOW_STEPS:
            return False
        excess = self.busy[rank] - self._usual(among)
        return THRESHOLD * self.ratio(rank, among) > 1.0 and excess > _SIGNIFICANT * self.deviation

    def waits_for_data(self, rank: int, among: Sequence[int]) -> bool:
        """True if most of the rank's time above the median is spent waiting for data."""
        usual = lower_median([self.data[other] for other in among])
        return 2.0 * (self.data[rank] - usual) > self.busy[rank] - self._usual(among)

    def _usual(self, among: Sequence[int]) -> float:
        return lower_median([self.busy[rank] for rank in among])


def _moved(before: Sequence[float], now: Sequence[float], part: float) -> tuple[float, ...]:
    return tuple(old + part * (new - old) for old, new in zip(before, now, strict=True))
