"""Who runs at all, and in which market: everybody gets the minimum or nothing, before anybody grows."""

from __future__ import annotations

from collections.abc import Sequence

from placement.cluster.free_slots import Room
from placement.policies.base import describe
from placement.policies.goodput.tables import Case, Seat


class Ledger:
    """What is promised in each market: counts where all workers are alike, else room on real nodes."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._left = case.capacities.copy()
        self._rooms = [] if case.alike else [Room(market.cluster) for market in case.markets]

    def left(self, job: int, market: int) -> int:
        """How many more of the job's workers fit."""
        if not self._rooms:
            return int(self._left[market] + 1e-6)
        return int(self._rooms[market].slots(self._case.views[job]).sum())

    def take(self, job: int, market: int, workers: int) -> bool:
        """All of them or nothing."""
        if not self._rooms:
            fits = workers <= self._left[market] + 1e-6
            self._left[market] -= workers if fits else 0
            return bool(fits)
        return self._rooms[market].add(self._case.views[job], workers)


def admit_into(
    case: Case, order: Sequence[int], present: Sequence[Seat]
) -> tuple[dict[int, tuple[int, int]], dict[int, str]]:
    """Give every job its minimum or nothing, in this order; a smaller job may pass one that does not fit.

    Held jobs are then raised to their number, in the order of arrival, as far as that fits.

    Returns:
        (market, workers) of each admitted job, and why each other one waits.
    """
    ledger = Ledger(case)
    floors: dict[int, tuple[int, int]] = {}
    waiting: dict[int, str] = {}
    for j in order:
        view = case.views[j]
        markets = sorted(
            range(len(case.markets)),
            key=lambda m, j=j: (m != present[j].market, -ledger.left(j, m), m),  # type: ignore[misc]
        )
        for m in markets:
            if ledger.left(j, m) >= view.min_workers and ledger.take(j, m, view.min_workers):
                floors[j] = m, view.min_workers
                break
        else:
            fits = sum(ledger.left(j, m) for m in range(len(case.markets)))
            waiting[j] = (
                f"waits: needs at least {view.min_workers} x {describe(view.bundle)}, "
                f"but beside the minimum of {len(floors)} other jobs {fits} fit"
            )
    for j in sorted(floors):
        market, floor = floors[j]
        held = case.views[j].held_at
        if held is not None:
            more = min(held - floor, ledger.left(j, market))
            if more > 0 and ledger.take(j, market, more):
                floors[j] = market, floor + more
    return floors, waiting
