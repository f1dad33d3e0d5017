"""Utility of every job's speed in a decision, and the value of a change after its cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placement.goodput.remaining import concave_value, discount
from placement.goodput.step_time import Floats
from placement.policies.goodput.tables import OptionTable, Placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeedValue:
    """Utility of speed in a decision, with one entry per job, (J,), or one number for all jobs."""

    weight: Floats
    left_s: Floats  # remaining time at speed 1 [s]; NaN where unknown
    cost_s: Floats  # time without progress that a change costs [s]
    stop_s: Floats  # time without progress that a stop and the later start cost [s]
    power: float  # exponent p of phi
    horizon_s: Floats  # time within which a change must pay back, per job [s]
    hysteresis: float  # relative gain that is worth taking a worker away for
    charge: float  # least weight of what a change costs
    crowded: bool  # whether long jobs may wait although their minimum fits, so that short ones run
    arrivals_per_s: float = 0.0  # jobs that arrive [1/s]; each may undo a change
    growth_hysteresis: float = 0.0  # relative gain that is worth giving a running job more workers for

    def where_gpus_idle(self) -> SpeedValue:
        """Return the utility for GPUs that no other job can use: a pause costs only the job that pauses."""
        return dataclasses.replace(self, charge=0.0, arrivals_per_s=0.0, growth_hysteresis=self.hysteresis)

    def of(self, jobs: NDArray[np.int64]) -> SpeedValue:
        """Return the utility restricted to the given jobs."""
        parts = {name: getattr(self, name)[jobs] for name in ("weight", "left_s", "cost_s", "stop_s", "horizon_s")}
        return dataclasses.replace(self, **parts)

    def values(self, speed: Floats, fewer: NDArray[np.bool_], same: NDArray[np.bool_]) -> Floats:
        """Return weight x phi(speed) - max(weight, charge) x (phi(speed) - phi(speed x discount)), (J, C).

        A stop is worth weight x (phi(0) + phi(discount)), since the job pauses when it starts again at speed 1.

        Args:
            speed: Speed in each option, (J, C).
            fewer: True if the option gives a running job no more workers than it has now.
            same: True if the option changes nothing for the job, so that no discount applies.
        """
        part = discount(speed, self.left_s, self.cost_s, self.horizon_s, self.arrivals_per_s)
        part = part / (1.0 + np.where(fewer, self.hysteresis, self.growth_hysteresis))
        worth = concave_value(speed, self.power)
        lost = worth - concave_value(speed * np.where(same, 1.0, part), self.power)
        weight = self.weight[:, np.newaxis]
        values: Floats = weight * worth - np.maximum(weight, self.charge) * lost
        if self.crowded:
            stops = fewer & ~same & (speed <= 0)
            part = discount(np.zeros_like(weight), self.left_s, self.stop_s, self.horizon_s, self.arrivals_per_s)
            resumed = concave_value(part / (1.0 + self.hysteresis), self.power)
            values = np.where(stops, weight * (worth + resumed), values)
        return values


def worth_of(
    instance: OptionTable,
    utility: SpeedValue,
    present: Sequence[Placement],
    placements: Sequence[Placement],
    valid: Sequence[bool],
    may_wait: Sequence[bool],
) -> tuple[float, float]:
    """Return (minus the total weight of jobs that would not run, sum of values of the others); larger is better.

    Args:
        instance: The jobs and pools.
        present: Current placements.
        placements: Placements to evaluate.
        valid: Per job, True if it may have its placement; otherwise it counts as not running.
        may_wait: Per job, True if waiting counts as an option with speed 0 instead of as not running.
    """
    had, has = (np.array([placement.workers for placement in each], dtype=np.int64) for each in (present, placements))
    runs = np.where(has > 0, valid, may_wait)
    stays = [now is then or now == then for now, then in zip(present, placements, strict=True)]
    same = np.array(stays, dtype=np.bool_) | (had == 0)
    fewer = (had > 0) & (has <= had)
    values = utility.values(instance.speed_at(placements)[:, np.newaxis], fewer[:, np.newaxis], same[:, np.newaxis])[
        :, 0
    ]
    return -round(float(utility.weight[~runs].sum()), 9), float(values[runs].sum())
