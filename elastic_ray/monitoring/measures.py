"""What each worker of a group measures of a step (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMeasures:
    """One worker's step.

    Attributes:
        compute_s: from its first micro-batch until its gradients were complete, without waiting for data [s]. On a GPU
            this is the time of the process that launches the work.
        data_s: waiting for the loader's batches in that step [s].
        sync_s: waiting for reductions to end, in the step before [s].
        step_s: the whole step before, from its end to that of its predecessor [s]; 0 for the first of a group.
        passed_s: since the same place in the last step that was committed, pauses included [s]; 0 for the first.
    """

    compute_s: float = 0.0
    data_s: float = 0.0
    sync_s: float = 0.0
    step_s: float = 0.0
    passed_s: float = 0.0


FIELDS = tuple(field.name for field in dataclasses.fields(WorkerMeasures))
"""In the order in which they travel."""


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
