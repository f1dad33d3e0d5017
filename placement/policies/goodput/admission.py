"""Which jobs run at all, and in which pool of GPUs: each gets its minimum or nothing, before any of them grows."""

from __future__ import annotations

from collections.abc import Sequence

from placement.cluster.free_resources import FreeResources
from placement.policies.goodput.tables import OptionTable, Placement
from placement.policies.shared.base import describe


class PoolCapacity:
    """What is promised in each pool: counts where all workers are alike, else room on real nodes."""

    def __init__(self, instance: OptionTable) -> None:
        self._case = instance
        self._left = instance.capacities.copy()
        self._rooms = [] if instance.alike else [FreeResources(pool.cluster) for pool in instance.pools]

    def left(self, job: int, pool: int) -> int:
        """How many more of the job's workers fit."""
        if not self._rooms:
            return int(self._left[pool] + 1e-6)
        return int(self._rooms[pool].slots(self._case.views[job]).sum())

    def take(self, job: int, pool: int, workers: int) -> bool:
        """All of them or nothing."""
        if not self._rooms:
            fits = workers <= self._left[pool] + 1e-6
            self._left[pool] -= workers if fits else 0
            return bool(fits)
        return self._rooms[pool].add(self._case.views[job], workers)


def admit_into(
    instance: OptionTable, order: Sequence[int], present: Sequence[Placement]
) -> tuple[dict[int, tuple[int, int]], dict[int, str]]:
    """Give every job its minimum or nothing, in this order; a smaller job may pass one that does not fit.

    Held jobs are then raised to their number, in the order of arrival, as far as that fits.

    Returns:
        (pool, workers) of each admitted job, and why each other one waits.
    """
    ledger = PoolCapacity(instance)
    floors: dict[int, tuple[int, int]] = {}
    waiting: dict[int, str] = {}
    for j in order:
        view = instance.views[j]
        pools = sorted(
            range(len(instance.pools)),
            key=lambda m, j=j: (m != present[j].pool, -ledger.left(j, m), m),  # type: ignore[misc]
        )
        for m in pools:
            if ledger.left(j, m) >= view.min_workers and ledger.take(j, m, view.min_workers):
                floors[j] = m, view.min_workers
                break
        else:
            fits = sum(ledger.left(j, m) for m in range(len(instance.pools)))
            waiting[j] = (
                f"waits: needs at least {view.min_workers} x {describe(view.bundle)}, "
                f"but beside the minimum of {len(floors)} other jobs {fits} fit"
            )
    for j in sorted(floors):
        pool, floor = floors[j]
        held = instance.views[j].held_at
        if held is not None:
            more = min(held - floor, ledger.left(j, pool))
            if more > 0 and ledger.take(j, pool, more):
                floors[j] = pool, floor + more
    return floors, waiting
