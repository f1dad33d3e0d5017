"""One step from the present allocation to a better one, if there is a better one after all costs of changing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from placement.cluster.packing import pack
from placement.goodput.table import Ints
from placement.policies.goodput.admission import admit_into
from placement.policies.goodput.dual_prices import Options, fill, solve
from placement.policies.goodput.objective import Stakes, worth_of
from placement.policies.goodput.seating import seat
from placement.policies.goodput.tables import NOWHERE, Case, Seat

_RUNNING = 1.5  # a waiting job must weigh so many times more than a running one to take its place
_ROUNDING = 1e-9
_FEW = 64  # jobs; among more, some job's regular size fits about as well as an irregular one


def present_seats(case: Case) -> tuple[list[Seat], list[bool]]:
    """Where the jobs are, on nodes that stay, and whether each may remain as it is."""
    index = {node: (m, i) for m, market in enumerate(case.markets) for i, node in enumerate(market.node_ids)}
    left: dict[tuple[int, tuple[object, ...]], Ints] = {}
    seats, valid = [], []
    for j, view in enumerate(case.views):
        if not view.allocation:
            seats.append(NOWHERE)
            valid.append(False)
            continue
        found = [(index[node], workers) for node, workers in view.allocation.items() if node in index]
        markets = {m for (m, _), _ in found}
        if len(markets) != 1:
            seats.append(NOWHERE)
            valid.append(False)
            continue
        here = Seat(market=markets.pop(), place={i: workers for (_, i), workers in sorted(found)})
        room = left.setdefault((here.market, case.breeds[j]), case.slots(j, here.market).copy())
        fits = all(workers <= room[i] for i, workers in here.place.items())
        if fits:
            for i, workers in here.place.items():
                room[i] -= workers
        allowed = view.min_workers <= here.workers <= view.max_workers
        held = view.held_at is None or here.workers <= view.held_at
        seats.append(here)
        valid.append(fits and allowed and held)
    return seats, valid if case.alike else _fit_together(case, seats, valid)


def _fit_together(case: Case, seats: Sequence[Seat], valid: Sequence[bool]) -> list[bool]:
    """Different bundles share nodes: whoever came first stays first."""
    kept: list[dict[int, int]] = [{} for _ in case.markets]
    for j, (here, ok) in enumerate(zip(seats, valid, strict=True)):
        if ok:
            kept[here.market][j] = here.workers
    counted = pack_seats(case, kept, seats)
    return [ok and then == now for ok, now, then in zip(valid, seats, counted, strict=True)]


def improve(
    case: Case, stakes: Stakes, present: Sequence[Seat], valid: Sequence[bool]
) -> tuple[list[Seat] | None, dict[int, str]]:
    """A better allocation, None if there is none, and why jobs wait that do.

    Two are tried: everything decided anew, and the present one with what is idle filled up. The better of them is
    taken if its worth, with every change discounted for its cost, exceeds that of staying. Since discounts vanish
    once a change is made, each step raises the worth, and repeating them comes to an end.
    """
    score = stakes.weight * np.where([bool(here.place) for here in present], _RUNNING, 1.0)
    rounded = [round(each, 9) for each in score.tolist()]
    order = sorted(range(len(present)), key=lambda j: -rounded[j])  # sorting keeps the order of arrival of equals
    may_wait = _may_wait(case, stakes, present)
    floors, waiting = admit_into(case, [j for j in order if not may_wait[j]], present)
    floors |= {j: (0, 0) for j in order if may_wait[j]}
    if not floors or not len(case.sizes):  # nobody is admitted, or there is no room at all
        nothing = [NOWHERE] * len(present)
        return (nothing if any(here.place for here in present) else None), waiting
    # What a user holds a job at is no question of worth: below it, where it fits, staying is no choice.
    obeyed = [
        may_wait[j] or case.views[j].held_at is None or floors.get(j, (0, 0))[1] == here.workers
        for j, here in enumerate(present)
    ]
    valid = [ok and obeys for ok, obeys in zip(valid, obeyed, strict=True)]
    question = _ask(case, stakes, present, valid, floors)
    candidates = [question.seated(picks) for picks in _anew(question)]
    runs = {j for j, here in enumerate(present) if here.place}
    if runs and all(valid[j] and j in floors for j in runs) and all(may_wait[j] for j in floors if j not in runs):
        stay = np.where([bool(present[j].place) for j in question.jobs], len(case.sizes) + 1, question.options.base)
        candidates.append(question.seated(fill(question.options, stay)))
    now = worth_of(case, stakes, present, present, valid, may_wait)
    everyone = [True] * len(present)
    ranked = [(worth_of(case, stakes, present, seats, everyone, may_wait), seats) for seats in candidates]
    worth, best = max(ranked, key=lambda item: item[0])
    better = worth[0] > now[0] or (worth[0] == now[0] and worth[1] > now[1] + _ROUNDING)
    return (best if better else None), waiting


def _may_wait(case: Case, stakes: Stakes, present: Sequence[Seat]) -> list[bool]:
    """Which jobs may get nothing although their minimum fits."""
    if not stakes.crowded:
        return [False] * len(present)
    return [
        view.held_at is None and (not here.place or view.stop_cost_s is not None)
        for view, here in zip(case.views, present, strict=True)
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Options of the admitted jobs: those of the case, then each job's floor (nothing, for one that may wait), then
    staying as it is.
    """

    case: Case
    present: Sequence[Seat]
    floors: Mapping[int, tuple[int, int]]
    jobs: list[int]
    options: Options
    workers: Ints
    regular: np.ndarray[tuple[int], np.dtype[np.bool_]]

    def seated(self, picks: Ints) -> list[Seat]:
        """Seats of all jobs for these options; those not admitted get none."""
        every = np.arange(len(picks))
        counts, markets = self.workers[every, picks], self.options.kinds[every, picks]
        wanted: list[dict[int, int]] = [{} for _ in self.case.markets]
        for row in np.flatnonzero(counts).tolist():
            wanted[markets[row]][self.jobs[row]] = int(counts[row])
        if not self.case.alike:
            return pack_seats(self.case, wanted, self.present)
        seats = [NOWHERE] * len(self.present)
        for m, sizes in enumerate(wanted):
            here = [self.present[j].place if self.present[j].market == m else {} for j in sizes]
            places = seat(self.case.slots(min(sizes), m), list(sizes.values()), here) if sizes else []
            for j, place in zip(sizes, places, strict=True):
                seats[j] = Seat(market=m, place=dict(sorted(place.items())))
        return seats


def _ask(
    case: Case, stakes: Stakes, present: Sequence[Seat], valid: Sequence[bool], floors: Mapping[int, tuple[int, int]]
) -> _Question:
    jobs = sorted(floors)
    rows = np.array(jobs, dtype=np.int64)
    here = np.array([present[j].workers for j in jobs], dtype=np.int64)
    market = np.array([present[j].market for j in jobs], dtype=np.int64)
    floor_market, floor = np.array([floors[j] for j in jobs], dtype=np.int64).reshape(len(jobs), 2).T
    stays = np.array([valid[j] and bool(present[j].place) for j in jobs], dtype=np.bool_)
    held = np.array([case.views[j].held_at is not None for j in jobs], dtype=np.bool_)
    possible = case.possible[rows] & ~held[:, np.newaxis]
    if not case.alike:
        possible &= case.kinds == floor_market[:, np.newaxis]  # room on real nodes was promised in that market
    width = (len(jobs), len(case.sizes))
    workers = np.concatenate(
        [np.broadcast_to(case.sizes, width), floor[:, np.newaxis], np.maximum(here, 1)[:, np.newaxis]], axis=1
    )
    kinds = np.concatenate(
        [np.broadcast_to(case.kinds, width), floor_market[:, np.newaxis], np.maximum(market, 0)[:, np.newaxis]], axis=1
    )
    speed_here = case.speed_at(present)[rows]
    speed = np.concatenate(
        [case.speed[rows], _floor_speed(case, rows, floor, floor_market)[:, np.newaxis], speed_here[:, np.newaxis]], 1
    )
    allowed = np.concatenate(
        [possible, np.ones((len(jobs), 1), np.bool_), (stays & (~held | (here == floor)))[:, np.newaxis]], 1
    )
    same = np.zeros_like(allowed)
    same[:, -1] = True
    fewer = (here[:, np.newaxis] > 0) & (workers <= here[:, np.newaxis])
    part = dataclasses.replace(
        stakes,
        weight=stakes.weight[rows],
        left_s=stakes.left_s[rows],
        cost_s=stakes.cost_s[rows],
        horizon_s=stakes.horizon_s[rows],
    )
    same[here == 0] = True  # a start costs the same now and later
    values = np.where(allowed, part.values(speed, fewer, same), -np.inf)
    sizes = workers * np.take_along_axis(case.unit[rows], kinds, axis=1)
    base = np.full(len(jobs), len(case.sizes), dtype=np.int64)
    # Shares of different resources may add up to more than 1; the floors do fit, since they were put on nodes.
    promised = np.bincount(floor_market, weights=sizes[:, -2], minlength=len(case.capacities))
    options = Options(
        values=values, sizes=sizes, kinds=kinds, capacities=np.maximum(case.capacities, promised), base=base
    )
    regular = np.concatenate([case.regular, [True, True]])
    return _Question(
        case=case, present=present, floors=floors, jobs=jobs, options=options, workers=workers, regular=regular
    )


def _floor_speed(case: Case, rows: Ints, floor: Ints, market: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Speed of the largest option that is not above the floor."""
    below = (case.sizes <= floor[:, np.newaxis]) & (case.kinds == market[:, np.newaxis])
    at = np.where(below, case.sizes, 0).argmax(axis=1)
    speeds: np.ndarray[tuple[int], np.dtype[np.float64]] = np.where(floor > 0, case.speed[rows, at], 0.0)
    return speeds


def _anew(question: _Question) -> list[Ints]:
    """Decide among regular sizes and fill up with any; where there are few jobs, decide among all sizes as well."""
    options = question.options
    regular = dataclasses.replace(options, values=np.where(question.regular, options.values, -np.inf))
    picks = [fill(options, solve(regular).picks)]
    if len(question.jobs) <= _FEW:
        picks.append(solve(options).picks)
    return picks


def pack_seats(case: Case, wanted: Sequence[Mapping[int, int]], present: Sequence[Seat]) -> list[Seat]:
    """Places for workers of different bundles, given by market and job: what fits nowhere is left out."""
    seats = [NOWHERE] * len(present)
    for m, (market, counts) in enumerate(zip(case.markets, wanted, strict=True)):
        views = []
        for j in counts:
            place = present[j].place if present[j].market == m else {}
            views.append(
                dataclasses.replace(case.views[j], allocation={market.node_ids[i]: n for i, n in place.items()})
            )
        packing = pack({case.views[j].job: workers for j, workers in counts.items()}, views, market.cluster)
        index = {node: i for i, node in enumerate(market.node_ids)}
        for j in counts:
            nodes = packing.allocation.get(case.views[j].job, {})
            seats[j] = Seat(market=m if nodes else -1, place={index[node]: n for node, n in sorted(nodes.items())})
    return seats
