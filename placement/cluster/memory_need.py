"""Memory that a worker needs, by group size, for a model that is divided among workers (pure)."""

from __future__ import annotations

import dataclasses

from placement.checks import check_whole


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that one worker needs in a group of W workers: ``replicated + ceil(sharded * min(copies, W) / W)``.

    The need falls as W grows, so a job fits if the group is large enough. With shard groups (HSDP) it falls only up to
    ``copies`` groups, since each worker then holds its part of one group.

    Attributes:
        available_bytes: Memory of one worker, at least 1.
        sharded_bytes: Size of one complete copy of the state that the workers divide among them.
        replicated_bytes: Memory that each worker needs regardless of group size: activations, the modules that
            are gathered at one time, buffers.
        copies: Workers that hold each sharded byte, if the group is that large; 2 in ``elastic_ray.fully_shard``.
        shard_size: Number of workers in a shard group; None for a single group.

    Raises:
        ValueError: A value is not a whole number in its range, or no group size gives a worker enough memory.

    Examples:
        >>> from placement.cluster.memory_need import MemoryNeed
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
        """Number of workers above which the need stays constant; None if it always falls."""
        return None if self.shard_size is None else self.copies * self.shard_size

    def need_bytes(self, workers: int) -> int:
        """Return the bytes that each worker needs in a group of `workers`.

        Raises:
            ValueError: `workers` is not a whole number from 1.
        """
        check_whole("workers", workers, least=1)
        workers = workers if self._most is None else min(workers, self._most)
        return self.replicated_bytes - (-self.sharded_bytes * min(self.copies, workers) // workers)

    @property
    def least_workers(self) -> int:
        """Smallest group size in which each worker has enough memory."""
        room = self.available_bytes - self.replicated_bytes
        # Who has no room for a whole copy has none in groups of ``copies`` either: there the quotient is above them.
        return 1 if self.sharded_bytes <= room else -(-self.sharded_bytes * self.copies // room)

    def shortage(self, workers: int) -> str:
        """Return a clause with the memory that a worker needs in a group of `workers`, and the memory it has."""
        need = bytes_text(self.need_bytes(workers))
        return f"a worker needs {need} in a group of {workers} and has {bytes_text(self.available_bytes)}"

    def after_failure(self, workers: int) -> str:
        """Return a clause about these numbers for a worker that ran out of memory in a group of `workers`."""
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
    """Format a number of bytes in the largest unit that it reaches."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
