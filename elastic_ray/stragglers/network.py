"""Detection of ranks that send slowly, though they compute as fast as the others (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ray.stragglers.detection import lower_median

_LOOK_S = 1.0  # shorter steps are taken together
_LOOKS = 10
_RECENT = (1 << _LOOKS) - 1
_SLOW_LOOKS = 7
_WORTH = 0.2  # part of the steps' time that it sends longer than the others; half of it ends a verdict
_TIMES = 2.0  # as long as the others for as many bytes; the root of it ends a verdict
_MOST_TIMES = 100.0
_LEAST_PART = 1e-3  # of the time of a look: what sends for less is not told apart from one that sends at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendTrace:
    """Sending times of a group's ranks, in looks of one step or a second.

    In a ring each rank sends as many bytes as any other, and all of them wait for the slowest connection: only the
    sender's kernel knows which one that is. It cannot tell a slow sender from a slow receiver at its other end.

    Attributes:
        seconds: of the look in progress [s].
        sending_s: in which each rank was sending, in the look in progress [s].
        mib: that each rank has handed to collectives, in the look in progress [MiB].
        recent: for each rank, which of the last ten looks were slow, one bit a look.
        ratios: how many times as long as the others each took for as many bytes, in the last look.
        slow: the present verdict, ranks in order.
    """

    seconds: float = 0.0
    sending_s: tuple[float, ...] = ()
    mib: tuple[float, ...] = ()
    looks: int = 0
    recent: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    slow: tuple[int, ...] = ()

    def add(self, *, sending_s: Sequence[float], mib: Sequence[float], seconds: float) -> SendTrace:
        """The trace after one more step of all ranks.

        Args:
            sending_s: time in which each was sending [s].
            mib: what each handed to collectives [MiB].
            seconds: time of the step [s].
        """
        sums = dataclasses.replace(
            self, seconds=self.seconds + seconds, sending_s=_plus(self.sending_s, sending_s), mib=_plus(self.mib, mib)
        )
        return sums._looked() if sums.seconds >= _LOOK_S else sums

    def _looked(self) -> SendTrace:
        """The look in progress is over."""
        ranks = range(len(self.sending_s))
        excess_s = [self.sending_s[rank] - self._of_others(rank, self.sending_s) for rank in ranks]
        least_s = _LEAST_PART * self.seconds
        sent = zip(self.sending_s, self.mib, strict=True)
        by_mib = [max(least_s, time_s) / mib if mib > 0 else 0.0 for time_s, mib in sent]
        usual = [self._of_others(rank, by_mib) for rank in ranks]
        ratios = [min(_MOST_TIMES, own / of) if of > 0 else 1.0 for own, of in zip(by_mib, usual, strict=True)]
        slow = [int(excess_s[rank] > _WORTH * self.seconds and ratios[rank] > _TIMES) for rank in ranks]
        lasts = [2 * excess_s[rank] > _WORTH * self.seconds and ratios[rank] ** 2 > _TIMES for rank in ranks]
        before = self.recent or (0,) * len(slow)
        recent = tuple((old << 1 | new) & _RECENT for old, new in zip(before, slow, strict=True))
        found = [
            rank for rank in ranks if recent[rank].bit_count() >= _SLOW_LOOKS or (rank in self.slow and lasts[rank])
        ]
        return SendTrace(looks=self.looks + 1, recent=recent, ratios=tuple(ratios), slow=tuple(found))

    @staticmethod
    def _of_others(rank: int, values: Sequence[float]) -> float:
        return lower_median([value for other, value in enumerate(values) if other != rank])

    def to_state(self) -> dict[str, Any]:
        """Plain values, for :meth:`from_state`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, tree: Mapping[str, Any]) -> SendTrace:
        """The inverse of :meth:`to_state`, of which tuples may have become lists."""
        lists = {name: tuple(tree[name]) for name in ("sending_s", "mib", "recent", "ratios", "slow")}
        return cls(seconds=tree["seconds"], looks=tree["looks"], **lists)


def _plus(before: Sequence[float], now: Sequence[float]) -> tuple[float, ...]:
    return tuple(now) if not before else tuple(old + new for old, new in zip(before, now, strict=True))
