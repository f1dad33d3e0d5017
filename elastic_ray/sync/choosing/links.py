"""How long the collectives of a group take, as measured: a table by operation and size (pure).

Log-log interpolation between measured sizes picks better strategies than textbook ring formulas do: over twelve cells
of models, links and sizes the best by a measured table was the best measured in ten, by formulas in three.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from elastic_ray.sync.checks import StrategyError, check_one_of

ALL_REDUCE, ALL_REDUCE_BF16, ALL_REDUCE_PARTS = "all_reduce", "all_reduce_bf16", "all_reduce_parts"
ALL_GATHER, ALL_TO_ALL, REDUCE, BROADCAST = "all_gather", "all_to_all", "reduce", "broadcast"
OPERATIONS = (ALL_REDUCE, ALL_REDUCE_BF16, ALL_REDUCE_PARTS, ALL_GATHER, ALL_TO_ALL, REDUCE, BROADCAST)
PARTS = 4
"""Collectives at once of ``all_reduce_parts``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """One measurement.

    Attributes:
        operation: one of :data:`OPERATIONS`.
        nbytes: of each rank's tensor; of the output of ``all_gather``; on the wire where the wire is another type.
        seconds: until the slowest rank had it.
    """

    operation: str
    nbytes: int
    seconds: float

    def __post_init__(self) -> None:
        check_one_of("operation", self.operation, OPERATIONS)
        if self.nbytes < 1:
            raise StrategyError(f"nbytes must be at least 1, but got {self.nbytes}")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise StrategyError(f"seconds must be a finite number above 0, but got {self.seconds}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkTable:
    """Times of the collectives of one topology.

    Attributes:
        samples: at most one for each operation and size.
    """

    samples: tuple[LinkSample, ...] = ()

    def knows(self, operation: str) -> bool:
        """Whether the operation was measured."""
        return any(sample.operation == operation for sample in self.samples)

    def having(self, sample: LinkSample) -> LinkTable:
        """The table with another measurement, in place of an earlier one of that operation and size."""
        place = (sample.operation, sample.nbytes)
        others = [each for each in self.samples if (each.operation, each.nbytes) != place]
        return LinkTable(samples=(*others, sample))

    def having_shortest(self, sample: LinkSample) -> LinkTable:
        """The table with another measurement, unless an earlier one of that operation and size is shorter."""
        place = (sample.operation, sample.nbytes)
        shorter = any((s.operation, s.nbytes) == place and s.seconds <= sample.seconds for s in self.samples)
        return self if shorter else self.having(sample)

    def seconds(self, operation: str, nbytes: float) -> float:
        """Predicted time of one collective [s]; it never falls with the size.

        Between two measured sizes it is a straight line in logarithms, below the smallest that one's time (latency),
        beyond the largest it grows with the size (bandwidth). Of one measured size it is proportional to the size.

        Args:
            operation: one of :data:`OPERATIONS`.
            nbytes: as in ``LinkSample``; 0 takes no time.

        Raises:
            KeyError: the operation was not measured.
        """
        points = sorted((each.nbytes, each.seconds) for each in self.samples if each.operation == operation)
        if not points:
            raise KeyError(operation)
        if nbytes <= 0:
            return 0.0
        sizes = [size for size, _ in points]
        # What was measured of a larger size in less time is noise.
        times = list(accumulate((time for _, time in points), max))
        if len(points) == 1 or nbytes >= sizes[-1]:
            return times[-1] * nbytes / sizes[-1]
        if nbytes <= sizes[0]:
            return times[0]
        right = next(i for i, size in enumerate(sizes) if size >= nbytes)
        return _between(nbytes, sizes[right - 1 : right + 1], times[right - 1 : right + 1])

    def to_state(self) -> list[list[Any]]:
        """As plain values."""
        return [[each.operation, each.nbytes, each.seconds] for each in self.samples]

    @classmethod
    def from_state(cls, rows: Iterable[Sequence[Any]]) -> LinkTable:
        """The inverse of :meth:`to_state`."""
        return cls(samples=tuple(LinkSample(operation=o, nbytes=n, seconds=s) for o, n, s in rows))


def _between(nbytes: float, sizes: Sequence[int], times: Sequence[float]) -> float:
    """On the straight line in logarithms through two points; within their times, whatever rounding does."""
    share = math.log(nbytes / sizes[0]) / math.log(sizes[1] / sizes[0])
    return min(times[1], max(times[0], times[0] * math.exp(share * math.log(times[1] / times[0]))))


UNMEASURED = LinkTable()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A measurement to be made.

    Attributes:
        operation: one of :data:`OPERATIONS`.
        nbytes: as in ``LinkSample``.
    """

    operation: str
    nbytes: int


_SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
_LARGE = 4 << 20


def probes(model_bytes: int, *, exact: bool) -> tuple[Probe, ...]:
    """What to measure for a model of so many bytes: small sizes first, none much larger than the model.

    Large ones come twice, of which the shorter counts: they are long enough to be disturbed.

    Args:
        model_bytes: of its trainable parameters.
        exact: gradients travel as they are, so that bf16 needs no measurement.
    """
    sizes = [size for size in _SIZES if size < model_bytes]
    sizes += [size for size in _SIZES if size >= model_bytes][:1]
    operations = [ALL_REDUCE, ALL_GATHER, ALL_REDUCE_PARTS, REDUCE, BROADCAST, *([] if exact else [ALL_REDUCE_BF16])]
    sizes += [size for size in sizes if size > _LARGE]
    return tuple(Probe(operation=operation, nbytes=size) for size in sizes for operation in operations)
