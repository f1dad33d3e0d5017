"""Wishes of the controller for a unit, once all of its workers know them: a unit votes as one rank of the job."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from elastic_ray.batch.limits import BatchChoice

if TYPE_CHECKING:
    from elastic_ray.communication.unit_group import UnitGroup
    from elastic_ray.membership.worker_side import WorkerMembership


_TOKEN_BITS = 32


class UnitWishes:
    """Wishes that all workers of a unit know; stands for the worker's membership where that votes.

    Args:
        membership: this worker's, which may have heard more than those of the others.
        unit: the workers that are to know alike.

    Attributes:
        voided: the present group was called off.
        measured: by position, number of parameter groups whose statistics were taken.
    """

    def __init__(self, membership: WorkerMembership, unit: UnitGroup) -> None:
        self._membership, self._unit = membership, unit
        self.stop_requested = self.preempting = False
        self.measured: list[float] = []
        self.begin()

    @property
    def generation(self) -> int:
        """Number of the present generation."""
        return self._membership.generation

    def begin(self) -> None:
        """A group was entered: what was known in another one does not count."""
        self.prepared_ahead = 0
        self.voided, self._save = False, 0
        self.wanted_batch: BatchChoice | None = None
        self.critical_batch = 0

    def settle(self, *, well: bool, due: bool, measured: float = 0.0) -> bool:
        """At one place of the program on all of the unit's workers: whether all is well there, and what they know.

        Args:
            well: what was to be done since the last time is done here.
            due: this worker has something to save.
            measured: number of parameter groups whose statistics it has taken.

        Raises UnitLostError: one of them is gone.
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

    def take_save(self) -> int:
        """Token of the checkpoint that is due, as the worker sees it that speaks for the unit, once; 0 for none."""
        token, self._save = self._save, 0
        return token

    def agree(self, well: bool) -> bool:
        """Return True if all is well on all workers of the unit."""
        return self._unit.agree(well)

    def alike(self, value: float) -> list[float]:
        """Every worker's value, by position."""
        return [row[0] for row in self._unit.gather([value])]
