"""Controller requests that are known to all workers of a unit, which votes as one rank of the job."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from elastic_ray.batch.limits import BatchChoice

if TYPE_CHECKING:
    from elastic_ray.communication.unit_group import UnitGroup
    from elastic_ray.membership.worker_side import WorkerMembership


_TOKEN_BITS = 32


class UnitWishes:
    """Controller requests that all workers of a unit know; votes use them instead of the worker's membership.

    Args:
        membership: This worker's membership, which may know more than the other workers' memberships in the unit.
        unit: Workers that must have the same knowledge.

    Attributes:
        voided: True if the current group was cancelled.
        measured: Number of parameter groups with measured statistics on each worker, in order of position.
    """

    def __init__(self, membership: WorkerMembership, unit: UnitGroup) -> None:
        self._membership, self._unit = membership, unit
        self.stop_requested = self.preempting = False
        self.measured: list[float] = []
        self.start()

    @property
    def generation(self) -> int:
        """Number of the current generation."""
        return self._membership.generation

    def start(self) -> None:
        """Enter a new group and discard the previous group's requests."""
        self.prepared_ahead = 0
        self.voided, self._save = False, 0
        self.wanted_batch: BatchChoice | None = None
        self.critical_batch = 0

    def complete(self, *, well: bool, due: bool, measured: float = 0.0) -> bool:
        """Exchange requests with the unit's workers, which all call this at the same point; True if all are ``well``.

        Args:
            well: True if everything on this worker has succeeded since the last call.
            due: True if this worker has a checkpoint to save; only the leading worker's value counts.
            measured: Number of parameter groups whose statistics this worker has measured.

        Raises UnitLostError if another worker is gone.
        """
        mine, batch = self._membership, self._membership.wanted_batch
        prepared = mine.generation + mine.prepared_ahead if mine.prepared_ahead else 0
        rows = self._unit.gather(
            [
                float(well),
                float(prepared),
                float(mine.stop_requested),
                float(mine.preempting),
                float(mine.voided),
                float(due and self._unit.leads and 1 + secrets.randbits(_TOKEN_BITS)),
                float(batch.atomic_bsz) if batch is not None else 0.0,
                float(batch.accum_steps) if batch is not None else 0.0,
                measured,
                float(mine.critical_batch),
            ]
        )
        first = rows[0]
        alike = all(row[1] == first[1] for row in rows)
        self.prepared_ahead = max(0, round(first[1]) - mine.generation) if alike and first[1] else 0
        self.stop_requested, self.preempting, self.voided = (any(row[each] for row in rows) for each in (2, 3, 4))
        self._save, self.measured = round(first[5]), [row[8] for row in rows]
        self.wanted_batch = BatchChoice(atomic_bsz=round(first[6]), accum_steps=round(first[7])) if first[6] else None
        self.critical_batch = round(first[9])
        return all(bool(row[0]) for row in rows)

    def pop_save(self) -> int:
        """Return the token of the checkpoint that the leading worker wants to save, and clear it; 0 for none."""
        token, self._save = self._save, 0
        return token

    def agree(self, well: bool) -> bool:
        """Return True if ``well`` is True on all workers of the unit."""
        return self._unit.agree(well)

    def alike(self, value: float) -> list[float]:
        """Return the ``value`` from each worker in the unit, by position, for comparison."""
        return [row[0] for row in self._unit.gather([value])]
