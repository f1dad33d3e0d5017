"""Measures that each worker of a group takes of a step (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

OPERATIONS = ("all_reduce", "all_gather", "all_to_all", "reduce", "broadcast", "send")
"""Collectives whose bytes are counted apart."""

_MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMeasures:
    """Measures of one worker's step.

    They travel in float32, so sizes are in MiB, a power of two: up to 64 MiB they are exact to the byte for gradients
    in float32, and to 1e-7 beyond.

    Attributes:
        compute_s: from its first micro-batch until its gradients were complete, without waiting for data [s]. On a GPU
            this is the time of the process that launches the work, not that of the device.
        data_s: waiting for the loader's batches in that step [s].
        sync_s: waiting for reductions to end, in the step before [s].
        step_s: the whole step before, from its end to that of its predecessor [s]; 0 for the first of a group.
        passed_s: since the same place in the last step that was committed, pauses included [s]; 0 for the first.
        host_mib: resident memory of the process, at the end of the step before [MiB].
        device_mib: what it holds of its GPU, as torch's allocator has reserved it [MiB]; 0 without one.
        memory_used: part of its memory that is taken, of the host, of its control group or of its GPU, whichever is
            nearest to its limit; from 0 to 1, looked at once a second.
        major_faults: pages that it had to fetch from a disk in the step before (swapped out, or of mapped files).
        sending_s: time in which its gloo connections had bytes that were not acknowledged yet, while their receivers
            had room for them, by step, looked at twice a second [s]; 0 where the kernel does not tell, as for NCCL.
        all_reduce_mib: handed to all-reduces in the step before, gradients and votes alike [MiB].
        all_gather_mib: the worker's own parts of all-gathers [MiB].
        all_to_all_mib: the worker's own parts of all-to-alls [MiB].
        reduce_mib: handed to reductions towards one rank [MiB].
        broadcast_mib: broadcast from this worker [MiB].
        send_mib: sent to single ranks [MiB].
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
        """Bytes that the worker handed to collectives in the step before [MiB].

        What crosses the network depends on the algorithm: a ring's all-reduce of b bytes sends 2 b (R - 1) / R.
        """
        return float(sum(getattr(self, f"{operation}_mib") for operation in OPERATIONS))

    @property
    def wire_mib_per_s(self) -> float:
        """Rate of bytes to collectives over the whole time of the step before [MiB/s]; 0 before a step was timed."""
        return self.wire_mib / self.step_s if self.step_s > 0 else 0.0


FIELDS = tuple(field.name for field in dataclasses.fields(WorkerMeasures))
"""In the order in which they travel."""


def mib(count: int) -> float:
    """Bytes in MiB."""
    return count / _MIB


def traffic_fields(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """Fields of ``WorkerMeasures`` for the bytes counted between two looks at a group's traffic."""
    return {f"{name}_mib": mib(count - before.get(name, 0)) for name, count in after.items()}


def packed(own: WorkerMeasures, rank: int, world_size: int) -> list[float]:
    """A row of zeros but for the place of ``rank``, so that a sum over all ranks holds every worker's measures."""
    values = [0.0] * (len(FIELDS) * world_size)
    first = len(FIELDS) * rank
    values[first : first + len(FIELDS)] = [getattr(own, name) for name in FIELDS]
    return values


def unpacked(sums: Sequence[float], world_size: int) -> tuple[WorkerMeasures, ...]:
    """The inverse for all ranks, from the sum of their rows."""
    count = len(FIELDS)
    rows = (sums[count * rank : count * (rank + 1)] for rank in range(world_size))
    return tuple(WorkerMeasures(**dict(zip(FIELDS, row, strict=True))) for row in rows)
