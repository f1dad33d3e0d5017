"""Measures that each worker in a group records in each step (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

OPERATIONS = ("all_reduce", "all_gather", "all_to_all", "reduce", "broadcast", "send")
"""Collectives whose bytes are counted apart."""

_MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMeasures:
    """Measures of one worker in one step.

    They are sent as float32, so sizes are in MiB, a power of two: up to 64 MiB they are exact to the byte for float32
    gradients, and to 1e-7 beyond that.

    Attributes:
        compute_s: Time from the first micro-batch until the gradients were complete, excluding waits for data [s]. On a
            GPU, this is the time spent by the process that launches the work, not by the device.
        data_s: Time spent waiting for the loader's batches in that step [s].
        sync_s: Time spent waiting for reductions in the previous step [s].
        step_s: Duration of the previous step, measured from when its predecessor ended [s]; 0 for a group's first.
        passed_s: Time since the same point in the last committed step, including pauses [s]; 0 for the first.
        host_mib: Resident memory of the process after the previous step [MiB].
        device_mib: GPU memory reserved by torch's allocator [MiB]; 0 without a GPU.
        memory_used: Used fraction (0 to 1) of the host's, control group's or GPU's memory, whichever is nearest to its
            limit; sampled once a second.
        major_faults: Number of pages read from disk in the previous step (swapped out, or from mapped files).
        sending_s: Time per step when gloo connections had unacknowledged bytes and receivers had room for them, sampled
            twice a second [s]; 0 if the kernel does not report it, as with NCCL.
        all_reduce_mib: Data passed to all-reduces in the previous step, including gradients and votes [MiB].
        all_gather_mib: The worker's own parts of all-gathers [MiB].
        all_to_all_mib: The worker's own parts of all-to-alls [MiB].
        reduce_mib: Data passed to reductions to a single rank [MiB].
        broadcast_mib: Data broadcast from this worker [MiB].
        send_mib: Data sent to single ranks [MiB].
    """

    compute_s: float = 0.0
    data_s: float = 0.0
    sync_s: float = 0.0
    step_s: float = 0.0
    passed_s: float = 0.0
    host_mib: float = 0.0
    device_mib: float = 0.0
    memory_used: float = 0.0
    major_faults: float = 0.0
    sending_s: float = 0.0
    all_reduce_mib: float = 0.0
    all_gather_mib: float = 0.0
    all_to_all_mib: float = 0.0
    reduce_mib: float = 0.0
    broadcast_mib: float = 0.0
    send_mib: float = 0.0

    @property
    def wire_mib(self) -> float:
        """Data that the worker passed to collectives in the previous step [MiB].

        The network traffic depends on the algorithm: a ring all-reduce of b bytes sends 2 b (R - 1) / R.
        """
        return float(sum(getattr(self, f"{operation}_mib") for operation in OPERATIONS))

    @property
    def wire_mib_per_s(self) -> float:
        """Data passed to collectives per second in the previous step [MiB/s]; 0 before a step has been timed."""
        return self.wire_mib / self.step_s if self.step_s > 0 else 0.0


def busiest(by_position: Sequence[Sequence[WorkerMeasures]]) -> tuple[WorkerMeasures, ...]:
    """Return, for each unit (workers that act as one rank), the measures of the worker that was busy longest.

    Args:
        by_position: ``by_position[p][u]`` is the measures of the worker at position p within unit u.
    """
    return tuple(
        max(workers, key=lambda each: each.compute_s + each.data_s) for workers in zip(*by_position, strict=True)
    )


FIELDS = tuple(field.name for field in dataclasses.fields(WorkerMeasures))
"""In the order in which they travel."""


def mib(count: int) -> float:
    """Convert a number of bytes to MiB."""
    return count / _MIB


def traffic_fields(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """Return the traffic between two readings (bytes, keyed by operation), as fields of ``WorkerMeasures`` [MiB]."""
    return {f"{name}_mib": mib(count - before.get(name, 0)) for name, count in after.items()}


def packed(own: WorkerMeasures, rank: int, world_size: int) -> list[float]:
    """Return values whose sum over all ranks holds each worker's: ``own`` at the place of ``rank``, zeros elsewhere."""
    values = [0.0] * (len(FIELDS) * world_size)
    first = len(FIELDS) * rank
    values[first : first + len(FIELDS)] = [getattr(own, name) for name in FIELDS]
    return values


def unpacked(sums: Sequence[float], world_size: int) -> tuple[WorkerMeasures, ...]:
    """Return the measures of all ``world_size`` ranks, given the sum of their :func:`packed` values."""
    count = len(FIELDS)
    rows = (sums[count * rank : count * (rank + 1)] for rank in range(world_size))
    return tuple(WorkerMeasures(**dict(zip(FIELDS, row, strict=True))) for row in rows)
