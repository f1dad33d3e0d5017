"""Local search: one step from the current allocation to a better one, if the gain exceeds the cost of changing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from placement.cluster.packing import FreeResources, pack
from placement.goodput.speeds import Ints
from placement.policies.goodput.dual_prices import Options, fill, solve
from placement.policies.goodput.node_assignment import assign_nodes, grow_in_place
from placement.policies.goodput.tables import UNPLACED, OptionTable, Placement, SpeedValue, worth_of
from placement.policies.shared.base import no_room
from placement.reasons import Reason

_T = TypeVar("_T", bound=np.generic)
_RUNNING = 1.5  # a waiting job must weigh so many times more than a running one to take its place
_ROUNDING = 1e-9
_FEW = 64  # jobs; among more, some job's regular size fits about as well as an irregular one


def present_placements(instance: OptionTable) -> tuple[list[Placement], list[bool]]:
    """Return each job's current placement on nodes that still exist, and whether each job may keep its placement."""
    index = {node: (m, i) for m, pool in enumerate(instance.pools) for i, node in enumerate(pool.node_ids)}
    left: dict[tuple[int, tuple[object, ...]], Ints] = {}
    placements, valid = [], []
    for j, view in enumerate(instance.views):
        if not view.allocation:
            placements.append(UNPLACED)
            valid.append(False)
            continue
        found = [(index[node], workers) for node, workers in view.allocation.items() if node in index]
        pools = {m for (m, _), _ in found}
        if len(pools) != 1:
            placements.append(UNPLACED)
            valid.append(False)
            continue
        here = Placement(pool=pools.pop(), place={i: workers for (_, i), workers in sorted(found)})
        room = left.setdefault((here.pool, instance.worker_kinds[j]), instance.slots(j, here.pool).copy())
        fits = all(workers <= room[i] for i, workers in here.place.items())
        if fits:
            for i, workers in here.place.items():
                room[i] -= workers
        allowed = view.min_workers <= here.workers <= view.max_workers
        held = view.held_at is None or here.workers <= view.held_at
        placements.append(here)
        valid.append(fits and allowed and held)
    return placements, valid if instance.alike else _fit_together(instance, placements, valid)


def _fit_together(instance: OptionTable, placements: Sequence[Placement], valid: Sequence[bool]) -> list[bool]:
    """Return a flag per placement: True if it fits; if bundles compete for a node, the earlier job has precedence."""
    kept: list[dict[int, int]] = [{} for _ in instance.pools]
    for j, (here, ok) in enumerate(zip(placements, valid, strict=True)):
        if ok:
            kept[here.pool][j] = here.workers
    counted = pack_placements(instance, kept, placements)
    return [ok and then == now for ok, now, then in zip(valid, placements, counted, strict=True)]


def improve(
    instance: OptionTable, utility: SpeedValue, present: Sequence[Placement], valid: Sequence[bool]
) -> tuple[list[Placement] | None, dict[int, Reason]]:
    """Return a better allocation (None if none exists), and the reasons for waiting jobs, keyed by job index.

    Two candidates are tried: a new decision about all jobs, and the current allocation with idle GPUs filled. The
    better one is used if its worth, with every change discounted for its cost, exceeds the worth of the current
    allocation. If it does not, and there is one GPU type, idle GPUs go to jobs whose own gain repays the pause, without
    the minimum charge for pauses: no other job can use these GPUs, and they would otherwise stay idle beside a long job
    for as long as short jobs come and go. If moving other jobs for this does not pay, the job gets scattered room.
    Discounts vanish once a change is made, so each step raises the worth of staying, and repeated calls terminate.
    """
    score = utility.weight * np.where([bool(here.place) for here in present], _RUNNING, 1.0)
    rounded = [round(each, 9) for each in score.tolist()]
    order = sorted(range(len(present)), key=lambda j: -rounded[j])  # sorting keeps the order of arrival of equals
    may_wait = _may_wait(instance, utility, present)
    floors, waiting = admit_into(instance, [j for j in order if not may_wait[j]], present)
    floors |= {j: (0, 0) for j in order if may_wait[j]}
    if not floors or not len(instance.sizes):  # no job is admitted, or there is no room at all
        nothing = [UNPLACED] * len(present)
        return (nothing if any(here.place for here in present) else None), waiting
    # What a user holds a job at is no matter of worth: below it, where it fits, staying is no choice.
    obeyed = [
        may_wait[j] or instance.views[j].held_at is None or floors.get(j, (0, 0))[1] == here.workers
        for j, here in enumerate(present)
    ]
    valid = [ok and obeys for ok, obeys in zip(valid, obeyed, strict=True)]
    search = _Search(instance=instance, utility=utility, present=present, valid=valid, may_wait=may_wait, floors=floors)
    alternatives = search.alternatives()
    candidates = [alternatives.placements_of(picks) for picks in _anew(alternatives)]
    stay = search.staying(alternatives)
    if stay is not None:
        candidates.append(alternatives.placements_of(fill(alternatives.options, stay)))
    better = search.best(candidates)
    # With several types it saved GPU-hours, but jobs took longer on the one trace that it was tried on.
    options, one_type = alternatives.options, len(instance.pools) == 1
    if better is None and stay is not None and one_type and (options.capacities - options.used(stay) > _ROUNDING).any():
        search = dataclasses.replace(search, utility=utility.where_gpus_idle())
        alternatives = search.alternatives()
        picks = fill(alternatives.options, stay)
        better = search.best([alternatives.placements_of(picks, moving=moving) for moving in (True, False)])
    return better, waiting


def _may_wait(instance: OptionTable, utility: SpeedValue, present: Sequence[Placement]) -> list[bool]:
    """Return a flag per job: True if it may get nothing even though its minimum fits."""
    if not utility.crowded:
        return [False] * len(present)
    return [
        view.held_at is None and (not here.place or view.stop_cost_s is not None)
        for view, here in zip(instance.views, present, strict=True)
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Alternatives:
    """Admitted jobs' options: the instance's, then the job's floor, then staying unchanged.

    The floor of a job that may wait is nothing.
    """

    instance: OptionTable
    present: Sequence[Placement]
    jobs: list[int]
    options: Options
    workers: Ints
    regular: np.ndarray[tuple[int], np.dtype[np.bool_]]

    def placements_of(self, picks: Ints, *, moving: bool = True) -> list[Placement]:
        """Return all jobs' placements for these options; jobs that are not admitted get none.

        Args:
            moving: True if jobs may be moved to make room for others. If False, jobs grow into scattered room, provided
                that all jobs' workers are alike.
        """
        every = np.arange(len(picks))
        counts, pools = self.workers[every, picks], self.options.pool_of[every, picks]
        wanted: list[dict[int, int]] = [{} for _ in self.instance.pools]
        for row in np.flatnonzero(counts).tolist():
            wanted[pools[row]][self.jobs[row]] = int(counts[row])
        if not self.instance.alike:
            return pack_placements(self.instance, wanted, self.present)
        placements = [UNPLACED] * len(self.present)
        for m, sizes in enumerate(wanted):
            here = [self.present[j].place if self.present[j].pool == m else {} for j in sizes]
            assign = assign_nodes if moving else grow_in_place
            places = assign(self.instance.slots(min(sizes), m), list(sizes.values()), here) if sizes else []
            for j, place in zip(sizes, places, strict=True):
                placements[j] = Placement(pool=m, place=dict(sorted(place.items())))
        return placements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Jobs with their current placements, and the placements possible for each."""

    instance: OptionTable
    utility: SpeedValue
    present: Sequence[Placement]
    valid: Sequence[bool]  # whether the job may stay unchanged
    may_wait: Sequence[bool]  # whether the job may get nothing even though its minimum fits
    floors: Mapping[int, tuple[int, int]]  # pool and workers of each admitted job

    def best(self, candidates: Sequence[list[Placement]]) -> list[Placement] | None:
        """Return the candidate with the highest worth, or None if staying is worth at least as much."""

        def worth(placements: Sequence[Placement], valid: Sequence[bool]) -> tuple[float, float]:
            return worth_of(self.instance, self.utility, self.present, placements, valid, self.may_wait)

        now, everyone = worth(self.present, self.valid), [True] * len(self.present)
        best, placements = max(((worth(each, everyone), each) for each in candidates), key=lambda item: item[0])
        better = best[0] > now[0] or (best[0] == now[0] and best[1] > now[1] + _ROUNDING)
        return placements if better else None

    def staying(self, alternatives: _Alternatives) -> Ints | None:
        """Return each admitted job's option to stay; None if no job is running, or if one cannot stay or must start."""
        runs = {j for j, here in enumerate(self.present) if here.place}
        if not runs or not all(self.valid[j] and j in self.floors for j in runs):
            return None
        if not all(self.may_wait[j] for j in self.floors if j not in runs):
            return None
        last = len(self.instance.sizes) + 1
        stay: Ints = np.where([j in runs for j in alternatives.jobs], last, alternatives.options.base)
        return stay

    def alternatives(self) -> _Alternatives:
        """Return the admitted jobs' options with the value of each."""
        instance, present, floors = self.instance, self.present, self.floors
        jobs = sorted(floors)
        rows = np.array(jobs, dtype=np.int64)
        here = np.array([present[j].workers for j in jobs], dtype=np.int64)
        pool = np.array([present[j].pool for j in jobs], dtype=np.int64)
        floor_pool, floor = np.array([floors[j] for j in jobs], dtype=np.int64).reshape(len(jobs), 2).T
        stays = np.array([self.valid[j] and bool(present[j].place) for j in jobs], dtype=np.bool_)
        held = np.array([instance.views[j].held_at is not None for j in jobs], dtype=np.bool_)
        possible = instance.possible[rows] & ~held[:, np.newaxis]
        if not instance.alike:
            possible &= instance.pool_of == floor_pool[:, np.newaxis]  # room on real nodes was promised in that pool
        width = (len(jobs), len(instance.sizes))
        workers = _columns(np.broadcast_to(instance.sizes, width), floor, np.maximum(here, 1))
        pool_of = _columns(np.broadcast_to(instance.pool_of, width), floor_pool, np.maximum(pool, 0))
        floor_speed = _floor_speed(instance, rows, floor, floor_pool)
        speed = _columns(instance.speed[rows], floor_speed, instance.speed_at(present)[rows])
        allowed = _columns(possible, np.ones(len(jobs), np.bool_), stays & (~held | (here == floor)))
        same = np.zeros_like(allowed)
        same[:, -1] = True
        fewer = (here[:, np.newaxis] > 0) & (workers <= here[:, np.newaxis])
        same[here == 0] = True  # a start costs the same now and later
        values = np.where(allowed, self.utility.of(rows).values(speed, fewer, same), -np.inf)
        sizes = workers * np.take_along_axis(instance.unit[rows], pool_of, axis=1)
        base = np.full(len(jobs), len(instance.sizes), dtype=np.int64)
        # Shares of different resources may add up to more than 1; the floors do fit, since they were put on nodes.
        promised = np.bincount(floor_pool, weights=sizes[:, -2], minlength=len(instance.capacities))
        options = Options(
            values=values, sizes=sizes, pool_of=pool_of, capacities=np.maximum(instance.capacities, promised), base=base
        )
        regular = np.concatenate([instance.regular, [True, True]])
        return _Alternatives(
            instance=instance, present=present, jobs=jobs, options=options, workers=workers, regular=regular
        )


def _columns(options: NDArray[_T], floor: NDArray[_T], stay: NDArray[_T]) -> NDArray[_T]:
    """Return the columns for all options: the instance's, then each job's floor, then staying unchanged."""
    return np.concatenate([options, floor[:, np.newaxis], stay[:, np.newaxis]], axis=1)


def _floor_speed(
    instance: OptionTable, rows: Ints, floor: Ints, pool: Ints
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return each job's speed at the largest option that does not exceed its floor."""
    below = (instance.sizes <= floor[:, np.newaxis]) & (instance.pool_of == pool[:, np.newaxis])
    at = np.where(below, instance.sizes, 0).argmax(axis=1)
    speeds: np.ndarray[tuple[int], np.dtype[np.float64]] = np.where(floor > 0, instance.speed[rows, at], 0.0)
    return speeds


def _anew(alternatives: _Alternatives) -> list[Ints]:
    """Choose among regular sizes and fill up with any size; with few jobs, also choose among all sizes."""
    options, instance = alternatives.options, alternatives.instance
    regular = dataclasses.replace(options, values=np.where(alternatives.regular, options.values, -np.inf))
    few = len(alternatives.jobs) <= _FEW
    solution = solve(regular, polished=not few)
    instance.cache.record_prices(
        {pool.gpu: float(price) for pool, price in zip(instance.pools, solution.multipliers, strict=True)}
    )
    picks = [fill(options, solution.picks)]
    if few:
        picks.append(solve(options, solution.multipliers).picks)
    return picks


def pack_placements(
    instance: OptionTable, wanted: Sequence[Mapping[int, int]], present: Sequence[Placement]
) -> list[Placement]:
    """Return each job's placement if workers need different resources; workers that do not fit are dropped."""
    placements = [UNPLACED] * len(present)
    for m, (pool, counts) in enumerate(zip(instance.pools, wanted, strict=True)):
        views = []
        for j in counts:
            place = present[j].place if present[j].pool == m else {}
            views.append(
                dataclasses.replace(instance.views[j], allocation={pool.node_ids[i]: n for i, n in place.items()})
            )
        packing = pack({instance.views[j].job: workers for j, workers in counts.items()}, views, pool.cluster)
        index = {node: i for i, node in enumerate(pool.node_ids)}
        for j in counts:
            nodes = packing.allocation.get(instance.views[j].job, {})
            placements[j] = Placement(
                pool=m if nodes else -1, place={index[node]: n for node, n in sorted(nodes.items())}
            )
    return placements


class PoolCapacity:
    """Capacity left in each pool: counts if all workers are alike, otherwise room on real nodes."""

    def __init__(self, instance: OptionTable) -> None:
        self._case = instance
        self._left = instance.capacities.copy()
        self._rooms = [] if instance.alike else [FreeResources(pool.cluster) for pool in instance.pools]

    def left(self, job: int, pool: int) -> int:
        """Return how many more of the job's workers fit into the pool; both arguments are indices."""
        if not self._rooms:
            return int(self._left[pool] + 1e-6)
        return int(self._rooms[pool].slots(self._case.views[job]).sum())

    def take(self, job: int, pool: int, workers: int) -> bool:
        """Reserve room for all of the workers or none; return True if they fit. ``job`` and ``pool`` are indices."""
        if not self._rooms:
            fits = workers <= self._left[pool] + 1e-6
            self._left[pool] -= workers if fits else 0
            return bool(fits)
        return self._rooms[pool].add(self._case.views[job], workers)


def admit_into(
    instance: OptionTable, order: Sequence[int], present: Sequence[Placement]
) -> tuple[dict[int, tuple[int, int]], dict[int, Reason]]:
    """Give every job its minimum or nothing, in the given order; a smaller job may overtake one that does not fit.

    Jobs with a size fixed by their user are then raised to it, or as close to it as room allows, in order of arrival.

    Returns (pool, workers) for each admitted job, and the reason for each waiting job, both keyed by job index.
    """
    ledger = PoolCapacity(instance)
    floors: dict[int, tuple[int, int]] = {}
    waiting: dict[int, Reason] = {}
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
            waiting[j] = no_room(view, fits, len(floors))
    for j in sorted(floors):
        pool, floor = floors[j]
        held = instance.views[j].held_at
        if held is not None:
            more = min(held - floor, ledger.left(j, pool))
            if more > 0 and ledger.take(j, pool, more):
                floors[j] = pool, floor + more
    return floors, waiting
