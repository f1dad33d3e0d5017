"""Whether a slow rank is short of memory (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ray.stragglers.detection import lower_median

FULL = 0.95
"""Part of a memory that is taken from which the kernel, or the GPU's allocator, is busy with making room."""

_FAULT_S = 1e-4  # the least that a page from a fast disk takes
_EXPLAINS = 0.25  # part of what a rank takes longer
_ALPHA = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace:
    """What the ranks of one group have shown of their memory, step by step.

    Attributes:
        faults_s: by rank, the least time that its pages from disks have taken, moving average over steps [s].
        compute_s: by rank, moving average of its compute time [s].
        used: by rank, the part of its memory that was taken last.
    """

    faults_s: tuple[float, ...] = ()
    compute_s: tuple[float, ...] = ()
    used: tuple[float, ...] = ()

    def add(self, *, faults: Sequence[float], compute_s: Sequence[float], used: Sequence[float]) -> MemoryTrace:
        """The trace after one more step."""
        now_s = [_FAULT_S * count for count in faults]
        return MemoryTrace(
            faults_s=_moved(self.faults_s or now_s, now_s),
            compute_s=_moved(self.compute_s or compute_s, compute_s),
            used=tuple(used),
        )

    def short(self, rank: int, among: Sequence[int]) -> bool:
        """Whether a slow rank lacks memory, by comparison with the ranks ``among``.

        Its pages from disks explain at least a quarter of what it takes longer, or its memory is full and theirs is
        not. What all ranks do (reading a mapped file) or have (a GPU that is full by design) explains nothing.
        """
        others = [other for other in among if other != rank]
        if not self.used or not others:
            return False
        beyond_s = self.faults_s[rank] - lower_median([self.faults_s[other] for other in others])
        excess_s = self.compute_s[rank] - lower_median([self.compute_s[other] for other in others])
        if excess_s <= 0.0:
            return False
        full = self.used[rank] >= FULL > lower_median([self.used[other] for other in others])
        return full or beyond_s >= _EXPLAINS * excess_s

    def to_state(self) -> dict[str, Any]:
        """Plain values, for :meth:`from_state`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, tree: Mapping[str, Any]) -> MemoryTrace:
        """The inverse of :meth:`to_state`, of which tuples may have become lists."""
        return cls(**{name: tuple(values) for name, values in tree.items()})


def _moved(before: Sequence[float], now: Sequence[float]) -> tuple[float, ...]:
    return tuple(old + _ALPHA * (new - old) for old, new in zip(before, now, strict=True))
