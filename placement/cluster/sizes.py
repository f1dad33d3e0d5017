"""Numbers of workers that a job may have, where not all between its least and its most will do."""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllowedSizes:
    """Sizes that a job can train with: those of groups of shards, of pipelines, of a batch that divides.

    Attributes:
        sizes: these only, each once and ascending; empty allows any.
        multiple_of: only multiples of this.

    Raises:
        TypeError, ValueError: they are no whole numbers from 1, or exclude each other.
    """

    sizes: tuple[int, ...] = ()
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, tuple):
            raise TypeError(f"sizes must be a tuple of numbers of workers, such as (1, 2, 4), but got {self.sizes!r}")
        for name, values in (("sizes", self.sizes), ("multiple_of", (self.multiple_of,))):
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise TypeError(f"{name} must hold whole numbers, but got {value!r}")
                if value < 1:
                    raise ValueError(f"{name} must be 1 or more, but got {value}")
        if any(later <= sooner for sooner, later in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"sizes must be ascending, each once, but got {self.sizes}")
        wrong = [size for size in self.sizes if size % self.multiple_of]
        if wrong:
            raise ValueError(
                f"sizes and multiple_of exclude each other: {wrong[0]} is no multiple of {self.multiple_of}; "
                "sizes alone say it"
            )

    @property
    def free(self) -> bool:
        """Whether any number is allowed."""
        return not self.sizes and self.multiple_of == 1

    def allow(self, workers: int) -> bool:
        """Whether the job can train with so many."""
        return self.at_most(workers) == workers

    def at_most(self, workers: int) -> int:
        """The largest allowed size that is not above this; 0 for none."""
        if not self.sizes:
            return max(workers - workers % self.multiple_of, 0)
        place = bisect.bisect_right(self.sizes, workers)
        return self.sizes[place - 1] if place else 0

    def at_least(self, workers: int) -> int | None:
        """The smallest allowed size from this one on; None where all are smaller."""
        if not self.sizes:
            return max(-(-workers // self.multiple_of), 1) * self.multiple_of
        place = bisect.bisect_left(self.sizes, workers)
        return self.sizes[place] if place < len(self.sizes) else None

    def within(self, least: int, most: int) -> tuple[int, int]:
        """The smallest and the largest allowed size between these.

        Raises:
            ValueError: none is.
        """
        low, high = self.at_least(least), self.at_most(most)
        if low is None or not low <= high:
            raise ValueError(f"no size from {least} to {most} workers is allowed by {self}")
        return low, high

    def or_any(self, least: int, most: int) -> tuple[AllowedSizes, int, int]:
        """These, with the smallest and the largest size between ``least`` and ``most``; any where none is allowed."""
        low, high = self.at_least(least), self.at_most(most)
        return (self, low, high) if low is not None and low <= high else (AllowedSizes(), least, most)

    def floors(self, most: int) -> NDArray[np.int64]:
        """``at_most`` of 0, 1, ... ``most``."""
        every = np.arange(most + 1, dtype=np.int64)
        if not self.sizes:
            return every - every % self.multiple_of
        known = np.array([0, *self.sizes], dtype=np.int64)
        floors: NDArray[np.int64] = known[np.searchsorted(known, every, side="right") - 1]
        return floors

    def __str__(self) -> str:
        return f"sizes={self.sizes}" if self.sizes else f"multiple_of={self.multiple_of}"


ANY_SIZE = AllowedSizes()
