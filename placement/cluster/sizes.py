"""Allowed numbers of workers for a job, and the memory per worker as a function of group size (pure)."""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np
from numpy.typing import NDArray

from placement.checks import check_whole, plain_numbers
from placement.text import count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllowedSizes:
    """Group sizes with which a job can train, restricted for instance by shard groups, pipelines or the batch."""

    sizes: tuple[int, ...] = ()  # these only, each once and ascending; empty allows any
    multiple_of: int = 1  # only multiples of this
    # what a worker needs and has; only sizes in which it has enough. None where any size fits.
    memory: MemoryNeed | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, tuple):
            raise TypeError(f"sizes must be a tuple of numbers of workers, such as (1, 2, 4), but got {self.sizes!r}")
        for name, values in (("sizes", self.sizes), ("multiple_of", (self.multiple_of,))):
            for value in values:
                check_whole(name, value, least=1)
        plain_numbers(self)
        if any(later <= sooner for sooner, later in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"sizes must be ascending, each once, but got {self.sizes}")
        wrong = [size for size in self.sizes if size % self.multiple_of]
        if wrong:
            raise ValueError(
                f"sizes and multiple_of exclude each other: {wrong[0]} is no multiple of {self.multiple_of}; "
                "sizes alone say it"
            )
        self._check_memory()

    def _check_memory(self) -> None:
        """Raise TypeError or ValueError if ``memory`` has the wrong type, or no element of ``sizes`` fits into it."""
        if self.memory is None:
            return
        if not isinstance(self.memory, MemoryNeed):
            raise TypeError(f"memory must be a MemoryNeed or None, but got {self.memory!r}")
        if self.sizes and self.sizes[-1] < self.fitting:
            raise ValueError(
                f"sizes and memory exclude each other: {self.memory.shortage(self.sizes[-1])}; the smallest group that "
                f"fits has {count(self.fitting)}"
            )

    @property
    def fitting(self) -> int:
        """Smallest group size that gives each worker enough memory, even if that size is not allowed."""
        return 1 if self.memory is None else self.memory.least_workers

    @property
    def free(self) -> bool:
        """True if any number of workers is allowed."""
        return not self.sizes and self.multiple_of == 1 and self.fitting == 1

    def allow(self, workers: int) -> bool:
        """True if the job can train with `workers` workers."""
        return self.at_most(workers) == workers

    def at_most(self, workers: int) -> int:
        """Return the largest allowed size that is at most ``workers``; 0 if none exists."""
        if self.sizes:
            place = bisect.bisect_right(self.sizes, workers)
            found = self.sizes[place - 1] if place else 0
        else:
            found = max(workers - workers % self.multiple_of, 0)
        return found if found >= self.fitting else 0

    def at_least(self, workers: int) -> int | None:
        """Return the smallest allowed size that is at least ``workers``; None if none exists."""
        least = max(workers, self.fitting)
        if not self.sizes:
            return -(-least // self.multiple_of) * self.multiple_of
        place = bisect.bisect_left(self.sizes, least)
        return self.sizes[place] if place < len(self.sizes) else None

    def within(self, least: int, most: int) -> tuple[int, int]:
        """Return the smallest and largest allowed size from ``least`` to ``most``; raise ValueError if none exists."""
        low, high = self.at_least(least), self.at_most(most)
        if low is None or not low <= high:
            why = ""
            if self.memory is not None and 1 <= most < self.fitting:
                why = f": {self.memory.shortage(most)}; the smallest allowed size that fits is {self.at_least(1)}"
            raise ValueError(f"no size from {least} to {most} workers satisfies {self}{why}")
        return low, high

    def or_any(self, least: int, most: int) -> tuple[AllowedSizes, int, int]:
        """Return these sizes, with the smallest and largest of them from ``least`` to ``most``."""
        low, high = self.at_least(least), self.at_most(most)
        return (self, low, high) if low is not None and low <= high else (AllowedSizes(), least, most)

    def floors(self, most: int) -> NDArray[np.int64]:
        """Return the largest allowed size up to k for k = 0, 1, ... ``most``; 0 if none exists."""
        every = np.arange(most + 1, dtype=np.int64)
        if self.sizes:
            known = np.array([0, *self.sizes], dtype=np.int64)
            floors: NDArray[np.int64] = known[np.searchsorted(known, every, side="right") - 1]
        else:
            floors = every - every % self.multiple_of
        return np.where(floors >= self.fitting, floors, 0)

    def __str__(self) -> str:
        said = [f"sizes={self.sizes}"] if self.sizes else []
        said += [f"multiple_of={self.multiple_of}"] if not self.sizes and self.multiple_of > 1 else []
        said += [f"memory={self.memory}"] if self.memory is not None else []
        return ", ".join(said) or "multiple_of=1"


ANY_SIZE = AllowedSizes()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that one worker needs in a group of W workers: ``replicated + ceil(sharded * min(copies, W) / W)``.

    The need falls as W grows, so a job fits if the group is large enough. With shard groups (HSDP), it falls only up to
    ``copies`` groups, since each worker then holds its part of a single group's state.

    Attributes:
        available_bytes: Memory available to one worker, at least 1.
        sharded_bytes: Size of one complete copy of the state that the workers divide among themselves.
        replicated_bytes: Memory that each worker needs regardless of group size: activations, modules gathered at the
            same time, and buffers.
        copies: Number of workers that hold each sharded byte, if the group is that large; 2 in
            ``elastic_ray.fully_shard``.
        shard_size: Number of workers in a shard group; None for a single group.

    Raises:
        TypeError: A value is not a whole number.
        ValueError: A value is outside its range, or no group size gives a worker enough memory.

    Examples:
        >>> from placement.cluster.sizes import MemoryNeed
        >>> need = MemoryNeed(available_bytes=16 << 30, sharded_bytes=48 << 30)
        >>> need.least_workers
        6
    """

    available_bytes: int
    sharded_bytes: int
    replicated_bytes: int = 0
    copies: int = 2
    shard_size: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("available_bytes", 1), ("sharded_bytes", 0), ("replicated_bytes", 0), ("copies", 1)):
            check_whole(name, getattr(self, name), least=least)
        if self.shard_size is not None:
            check_whole("shard_size", self.shard_size, least=1)
        plain_numbers(self)
        if self.available_bytes < self.replicated_bytes + min(self.sharded_bytes, 1):
            raise ValueError(
                "available_bytes must be above replicated_bytes, because more workers do not reduce replicated bytes, "
                f"but got available_bytes={self.available_bytes} and replicated_bytes={self.replicated_bytes}"
            )
        if self._most is not None and self.need_bytes(self._most) > self.available_bytes:
            raise ValueError(
                f"available_bytes must be {self.need_bytes(self._most)} or more, which a worker needs in groups of any "
                f"size with shard_size={self.shard_size}, but got {self.available_bytes}; larger shard groups need less"
            )

    @property
    def _most(self) -> int | None:
        """Number of workers beyond which the need stays constant; None if it always falls."""
        return None if self.shard_size is None else self.copies * self.shard_size

    def need_bytes(self, workers: int) -> int:
        """Return the bytes that each worker needs in a group of `workers`.

        Raises:
            TypeError, ValueError: `workers` is not a whole number of at least 1.
        """
        check_whole("workers", workers, least=1)
        workers = workers if self._most is None else min(workers, self._most)
        return self.replicated_bytes - (-self.sharded_bytes * min(self.copies, workers) // workers)

    @property
    def least_workers(self) -> int:
        """Smallest group size that gives each worker enough memory."""
        room = self.available_bytes - self.replicated_bytes
        # Who has no room for a whole copy has none in groups of ``copies`` either: there the quotient is above them.
        return 1 if self.sharded_bytes <= room else -(-self.sharded_bytes * self.copies // room)

    def shortage(self, workers: int) -> str:
        """Return a clause for messages: a worker's memory need in a group of this size, and the memory it has."""
        need = bytes_text(self.need_bytes(workers))
        return f"a worker needs {need} in a group of {workers} and has {bytes_text(self.available_bytes)}"

    def after_failure(self, workers: int) -> str:
        """Return a clause for messages about a worker that ran out of memory in a group of ``workers`` workers."""
        if workers < self.least_workers:
            return f"{self.shortage(workers)}, by SchedulingConfig(memory=...)"
        need, has = bytes_text(self.need_bytes(workers)), bytes_text(self.available_bytes)
        return (
            f"SchedulingConfig(memory=...) says that a worker needs {need} in a group of {workers}, and has {has}: it "
            "needs more; with a larger replicated_bytes, the other_bytes of sharded_memory(), the job gets more workers"
        )

    def __str__(self) -> str:
        return f"<from {self.least_workers} on>"


def bytes_text(count: int) -> str:
    """Return a number of bytes as text, in the largest suitable unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
