"""Detection of slow ranks from their step times (pure).

Only additions, multiplications, divisions and comparisons are used, which IEEE 754 specifies to the last bit, so that
ranks on different kinds of machines reach the same verdict.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from typing_extensions import Self

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
    """Return the median; for an even number of values, the lower of the two middle ones."""
    return sorted(values)[(len(values) - 1) // 2]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Base class for records of a group's steps; each field is a number, or a tuple with one entry per rank."""

    def to_state(self) -> dict[str, Any]:
        """Return the fields as plain values, for :meth:`from_state`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, tree: Mapping[str, Any]) -> Self:
        """Restore a trace from the output of :meth:`to_state`, where tuples may have become lists."""
        return cls(**{name: _as_tuple(value) for name, value in tree.items()})


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(each) for each in value) if isinstance(value, list | tuple) else value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTrace(Trace):
    """Moving averages of each rank's step times in one group, since its members or shares last changed.

    A rank's time t is compared with the time of the median rank for equal work. Part of a step's time does not grow
    with its work, and the size of that part is unknown. For a healthy rank with q times the median's work, only this
    bound is known: t <= max(1, q) x the median's t. Times are divided by that bound, so unequal work alone never makes
    a rank slow.
    """

    skipped: int = 0  # steps that were left out at the beginning
    steps: int = 0  # steps that count
    busy: tuple[float, ...] = ()  # average time of each rank over the mean of all ranks in the same step
    data: tuple[float, ...] = ()  # the part of it that is waiting for data
    deviation: float = 0.0  # average over steps of the ranks' median distance from their averages
    recent: tuple[int, ...] = ()  # for each rank, which of the last ten steps were slow, one bit a step
    last: tuple[tuple[float, ...], ...] = ()  # times of the ranks in the last five steps, each over the mean of all

    def add(
        self, *, work: Sequence[float], busy_s: Sequence[float], data_s: Sequence[float], among: Sequence[int]
    ) -> SpeedTrace:
        """Return the trace after one more step.

        Args:
            work: Number of samples (or tokens) on each rank; the step is ignored if any rank has none.
            among: Ranks not known to be slow; their median work is the reference.
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
            busy=moved(before, now, part),
            data=moved(self.data or waits, waits, part),
            deviation=self.deviation + max(_ALPHA, 1.0 / max(1, self.steps)) * (distance - self.deviation),
            recent=tuple((old << 1 | new) & _RECENT for old, new in zip(slow_steps, slow, strict=True)),
            last=(*self.last[1 - _LAST :], tuple(time / mean for time in times)),
        )

    @property
    def ready(self) -> bool:
        """True once enough steps have been recorded to decide which ranks are slow."""
        return self.steps >= MIN_STEPS

    def ratio(self, rank: int, among: Sequence[int]) -> float:
        """Return a rank's average time for equal work, divided by the median of ``among``; 1 before the first step."""
        return self.busy[rank] / self._usual(among) if self.steps else 1.0

    def last_ratio(self, rank: int, among: Sequence[int]) -> float:
        """Return a rank's median time for equal work in the last five steps, divided by the median of ``among``."""
        middle = [lower_median(times) for times in zip(*self.last, strict=True)]
        return middle[rank] / lower_median([middle[other] for other in among])

    def slow(self, rank: int, among: Sequence[int]) -> bool:
        """True if the rank is slower than the ranks ``among``: on average, in most recent steps, and beyond noise."""
        if not self.ready or self.recent[rank].bit_count() < _SLOW_STEPS:
            return False
        excess = self.busy[rank] - self._usual(among)
        return THRESHOLD * self.ratio(rank, among) > 1.0 and excess > _SIGNIFICANT * self.deviation

    def waits_for_data(self, rank: int, among: Sequence[int]) -> bool:
        """True if the rank spends most of its extra time, compared with the median of ``among``, waiting for data."""
        usual = lower_median([self.data[other] for other in among])
        return 2.0 * (self.data[rank] - usual) > self.busy[rank] - self._usual(among)

    def _usual(self, among: Sequence[int]) -> float:
        return lower_median([self.busy[rank] for rank in among])


def moved(before: Sequence[float], now: Sequence[float], part: float) -> tuple[float, ...]:
    """Return the averages ``before``, each moved towards its value in ``now`` by the fraction ``part`` of the gap."""
    return tuple(old + part * (new - old) for old, new in zip(before, now, strict=True))


_LOOK_S = 1.0  # shorter steps are taken together
_LOOKS = 10
_RECENT_LOOKS = (1 << _LOOKS) - 1
_SLOW_LOOKS = 7
_WORTH = 0.2  # part of the steps' time that it sends longer than the others; half of it ends a verdict
_TIMES = 2.0  # as long as the others for as many bytes; the root of it ends a verdict
_MOST_RATIO = 100.0
_LEAST_PART = 1e-3  # of the time of a look: what sends for less is not told apart from one that sends at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendTrace(Trace):
    """Sending times of a group's ranks, evaluated after each step or each second, whichever is longer.

    In a ring, all ranks send the same number of bytes and wait for the slowest connection. Only the kernel of the
    sender knows which connection is the slowest, and it cannot distinguish a slow sender from a slow receiver.
    """

    seconds: float = 0.0  # of the look in progress [s]
    sending_s: tuple[float, ...] = ()  # in which each rank was sending, in the look in progress [s]
    mib: tuple[float, ...] = ()  # that each rank has handed to collectives, in the look in progress [MiB]
    looks: int = 0
    recent: tuple[int, ...] = ()  # for each rank, which of the last ten looks were slow, one bit a look
    ratios: tuple[float, ...] = ()  # how many times as long as the others each took for as many bytes, in the last look
    slow: tuple[int, ...] = ()  # the present verdict, ranks in order

    def add(self, *, sending_s: Sequence[float], mib: Sequence[float], seconds: float) -> SendTrace:
        """Return the trace after one more step on all ranks."""
        sums = dataclasses.replace(
            self, seconds=self.seconds + seconds, sending_s=plus(self.sending_s, sending_s), mib=plus(self.mib, mib)
        )
        return sums._looked() if sums.seconds >= _LOOK_S else sums

    def _looked(self) -> SendTrace:
        """Return the trace after evaluating the current interval."""
        ranks = range(len(self.sending_s))
        excess_s = [self.sending_s[rank] - self._of_others(rank, self.sending_s) for rank in ranks]
        least_s = _LEAST_PART * self.seconds
        sent = zip(self.sending_s, self.mib, strict=True)
        by_mib = [max(least_s, time_s) / mib if mib > 0 else 0.0 for time_s, mib in sent]
        usual = [self._of_others(rank, by_mib) for rank in ranks]
        ratios = [min(_MOST_RATIO, own / of) if of > 0 else 1.0 for own, of in zip(by_mib, usual, strict=True)]
        slow = [int(excess_s[rank] > _WORTH * self.seconds and ratios[rank] > _TIMES) for rank in ranks]
        lasts = [2 * excess_s[rank] > _WORTH * self.seconds and ratios[rank] ** 2 > _TIMES for rank in ranks]
        before = self.recent or (0,) * len(slow)
        recent = tuple((old << 1 | new) & _RECENT_LOOKS for old, new in zip(before, slow, strict=True))
        found = [
            rank for rank in ranks if recent[rank].bit_count() >= _SLOW_LOOKS or (rank in self.slow and lasts[rank])
        ]
        return SendTrace(looks=self.looks + 1, recent=recent, ratios=tuple(ratios), slow=tuple(found))

    @staticmethod
    def _of_others(rank: int, values: Sequence[float]) -> float:
        return lower_median([value for other, value in enumerate(values) if other != rank])


def plus(before: Sequence[float], now: Sequence[float]) -> tuple[float, ...]:
    """Return the elementwise sums of ``before`` and ``now``; an empty ``before`` counts as zeros."""
    return tuple(now) if not before else tuple(old + new for old, new in zip(before, now, strict=True))


Response = Literal["ignore", "tell", "share", "replace"]
"""What is done about a straggler; each includes what stands before it."""

RESPONSES: tuple[str, ...] = get_args(Response)


class StragglerCause(str, enum.Enum):
    """Probable cause of a worker's slowness, inferred from all workers' measurements."""

    WORKER = "worker"
    NODE = "node"
    DATA = "data"
    MEMORY = "memory"
    NETWORK = "network"

    @property
    def sentence(self) -> str:
        """Description of the cause, as a sentence."""
        return {
            StragglerCause.WORKER: "the others on its node, if any, are not slow",
            StragglerCause.NODE: "all workers on its node are slow",
            StragglerCause.DATA: "it waits for its data",
            StragglerCause.MEMORY: "its memory is full, or it fetches pages from a disk",
            StragglerCause.NETWORK: "its network, or that of the worker that it sends to",
        }[self]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StragglerConfig:
    """Configuration of how a job responds to stragglers."""

    response: Response = "ignore"  # see :data:`Response`
    patience_s: float = 60.0  # how long a worker must have been slow before it is replaced [s]

    def __post_init__(self) -> None:
        if self.response not in RESPONSES:
            raise ValueError(f"stragglers must be one of {', '.join(RESPONSES)}, but got {self.response!r}")
        if not (self.patience_s > 0 and math.isfinite(self.patience_s)):
            raise ValueError(f"patience_s must be above 0 seconds and finite, but got {self.patience_s}")

    def goes_beyond(self, other: StragglerConfig) -> bool:
        """True if this response is stronger than the response of ``other``, that is, later in ``RESPONSES``."""
        return RESPONSES.index(self.response) > RESPONSES.index(other.response)

    @property
    def watches(self) -> bool:
        """True if stragglers are detected, whatever the response."""
        return self.response != "ignore"

    @property
    def shares(self) -> bool:
        """True if slow workers get fewer samples."""
        return self.response in ("share", "replace")

    @property
    def replaces(self) -> bool:
        """True if workers that stay slow are replaced."""
        return self.response == "replace"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowWorker:
    """Worker that slows down its entire group, with its time ratio and probable cause."""

    worker: str
    node: str
    # how many times as long as the others it takes for the same work, above 1; of a slow network, to send as many bytes
    ratio: float
    cause: StragglerCause  # why, as far as that can be told
    weight: float = 1.0  # its share of a step's samples, that of a worker that is not slow being 1
    # part of its time at weight 1 that did not shrink with its samples, from 0 to 1; None before its first steps at
    # another weight
    fixed: float | None = None
    slow_s: float = 0.0  # for how long it has been slow [s]
    replace: bool = False  # whether it is to be replaced

    def __str__(self) -> str:
        what = " to send as much" if self.cause is StragglerCause.NETWORK else ""
        return f"worker {self.worker} takes {self.ratio:.1f} times as long as the others{what}: {self.cause.sentence}"
