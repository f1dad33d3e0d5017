"""One decision's question in arrays: J jobs, C options (a size in a market), and how fast each job is in each."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import FIRST_WORKERS, JobView
from placement.goodput.speeds import Memory, table
from placement.goodput.step_time import Floats
from placement.goodput.table import Ints
from placement.policies.goodput.gpu_pools import Breed, Market, breed, menu, nodes_needed, split

Place = Mapping[int, int]
"""Workers by index of the node within a market."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a job is.

    Attributes:
        market: index; -1 is nowhere.
        place: workers per node index there.
        workers: workers altogether.
    """

    market: int = -1
    place: Place = dataclasses.field(default_factory=dict)
    workers: int = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", sum(self.place.values()))


NOWHERE = Seat()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything about a decision that does not depend on where the jobs are now.

    Attributes:
        views: the jobs, in the order of arrival.
        markets: GPU types.
        breeds: breed of each job.
        kinds: market of each option, (C,).
        sizes: workers of each option, (C,).
        regular: whether an option leaves no scattered room, (C,).
        nodes: the fewest nodes of each option, (J, C).
        possible: whether the job may have the option, (J, C).
        speed: goodput of each option over that of the smallest size, (J, C).
        rate: goodput on the smallest size [samples/s], (J,); 0 without a model.
        unit: what one worker takes of a market, (J, K): 1 where all workers are alike, else its dominant share.
        capacities: of each market in these units, (K,).
        alike: whether the workers of all jobs are interchangeable, so that counting them is enough.
        memory: of what was computed before.
    """

    views: tuple[JobView, ...]
    markets: tuple[Market, ...]
    breeds: tuple[Breed, ...]
    kinds: Ints
    sizes: Ints
    regular: NDArray[np.bool_]
    nodes: Ints
    possible: NDArray[np.bool_]
    speed: Floats
    rate: Floats
    unit: Floats
    capacities: Floats
    alike: bool
    memory: Memory

    def slots(self, job: int, market: int) -> Ints:
        """How many of the job's workers each node of the market could hold if it were empty."""
        return self.markets[market].slots[self.breeds[job]]

    def speed_at(self, seats: Sequence[Seat]) -> Floats:
        """Speed of each job where it is, (J,); 0 for those that are nowhere."""
        speed = np.zeros(len(seats))
        if not len(self.sizes):
            return speed
        found = [(j, seat.market, seat.workers, len(seat.place)) for j, seat in enumerate(seats) if seat.place]
        rows, kinds, workers, spread = np.array(found, dtype=np.int64).reshape(len(found), 4).T
        option = self._option(kinds, workers)
        listed = (option >= 0) & (self.nodes[rows, option] == spread)
        speed[rows[listed]] = self.speed[rows[listed], option[listed]]
        for m, market in enumerate(self.markets):
            other = (kinds == m) & ~listed
            if other.any():
                j, size = rows[other], workers[other, np.newaxis]
                views = [self.views[row] for row in j.tolist()]
                rates = table(views, market.gpu, spread[other, np.newaxis], size, self.memory)
                speed[j] = _relative(rates, self.rate[j], size)[:, 0]
        return speed

    def _option(self, kinds: Ints, workers: Ints) -> Ints:
        """Index of the option of that market and size, -1 where it is not on the menu."""
        most = int(max(self.sizes.max(), workers.max(initial=0)))
        index = np.full((len(self.markets) + 1, most + 1), -1, dtype=np.int64)
        index[self.kinds, self.sizes] = np.arange(len(self.sizes))
        found: Ints = index[kinds, workers]
        return found


def useful(view: JobView, gpu: str) -> int:
    """The most workers worth giving to the job on this GPU type, never below its minimum.

    ``JobView.useful_workers`` with the batch limits of the type, and what exploration allows.
    """
    most = view.max_workers
    batch = view.max_batch_size if view.max_batch_size is not None else view.init_batch_size
    bounds = view.atomic_bsz_ranges.get(gpu, view.atomic_bsz_range)
    if batch is not None:
        most = min(most, batch // (bounds[0] if bounds else 1))
    if view.goodput is None:
        most = min(most, max(2 * view.most_workers, view.workers, FIRST_WORKERS))
    if view.growth_limit is not None:
        most = min(most, max(view.growth_limit, view.workers))
    return max(most, view.min_workers)


def build(jobs: Sequence[JobView], cluster: Cluster, memory: Memory | None = None) -> Case:
    """Put a decision's question into arrays."""
    memory = Memory() if memory is None else memory
    views = tuple(sorted(jobs, key=lambda view: view.arrival))
    breeds = tuple(breed(view) for view in views)
    samples = dict(zip(breeds, views, strict=True))
    number = {kind: i for i, kind in enumerate(samples)}
    which = np.array([number[kind] for kind in breeds], dtype=np.int64)
    markets = split(cluster, samples)
    alike = len(samples) <= 1
    kinds, sizes, regular, most = [], [], [], np.zeros((len(views), len(markets)), dtype=np.int64)
    totals = _by_breed([[market.slots[kind].sum() for market in markets] for kind in samples], which, len(markets))
    must = {size for view in views for size in (view.min_workers, view.held_at or 0)}
    for m, market in enumerate(markets):
        most[:, m] = [useful(view, market.gpu) for view in views]
        node = max((int(slots.max(initial=0)) for slots in market.slots.values()), default=0)
        extra = set(np.minimum(most[:, m], totals[:, m].astype(np.int64)).tolist()) if len(views) <= 256 else set()
        total = int(totals[:, m].max(initial=0))
        offered = menu(node, total, max(int(most[:, m].max(initial=0)), 1), extra | must)
        kinds.append(np.full(len(offered.sizes), m, dtype=np.int64))
        sizes.append(offered.sizes)
        regular.append(offered.regular)
    empty = np.zeros(0, dtype=np.int64)
    all_kinds, all_sizes = np.concatenate([empty, *kinds]), np.concatenate([empty, *sizes])
    nodes = _nodes(samples, markets, sizes)[which]
    low = np.array([view.min_workers for view in views], dtype=np.int64)[:, np.newaxis]
    possible = (nodes > 0) & (all_sizes >= low) & (all_sizes <= most[:, all_kinds])
    speed, rate = _speeds(views, markets, nodes, all_kinds, all_sizes, low, memory)
    unit = np.ones_like(totals)
    if not alike:
        unit = _by_breed([[market.shares[kind] for market in markets] for kind in samples], which, len(markets))
    return Case(
        views=views,
        markets=markets,
        breeds=breeds,
        kinds=all_kinds,
        sizes=all_sizes,
        regular=np.concatenate([np.zeros(0, dtype=np.bool_), *regular]),
        nodes=nodes,
        possible=possible,
        speed=speed,
        rate=rate,
        unit=unit,
        capacities=totals[0] if alike and len(views) else np.ones(len(markets)),
        alike=alike,
        memory=memory,
    )


def _by_breed(numbers: Sequence[Sequence[float]], which: Ints, width: int) -> Floats:
    """A row for each job out of a row for each breed."""
    rows: Floats = np.array(numbers, dtype=np.float64).reshape(len(numbers), width)[which]
    return rows


def _nodes(breeds: Collection[Breed], markets: Sequence[Market], sizes: Sequence[Ints]) -> Ints:
    """Fewest nodes of every option for every breed, one a row."""
    rows = [[nodes_needed(m.slots[kind], s) for m, s in zip(markets, sizes, strict=True)] for kind in breeds]
    empty = np.zeros(0, dtype=np.int64)
    return np.array([np.concatenate([empty, *row]) for row in rows]).reshape(len(rows), sum(map(len, sizes)))


def _speeds(
    views: Sequence[JobView],
    markets: Sequence[Market],
    nodes: Ints,
    kinds: Ints,
    sizes: Ints,
    low: Ints,
    memory: Memory,
) -> tuple[Floats, Floats]:
    rates = np.full(nodes.shape, np.nan)
    if not nodes.size:
        return rates, np.zeros(len(views))
    first = np.full(len(views), np.inf)
    workers = np.broadcast_to(sizes, nodes.shape)
    for m, market in enumerate(markets):
        own = kinds == m
        rates[:, own] = table(views, market.gpu, nodes[:, own], workers[:, own], memory)
        # The yardstick is the smallest size that runs at all, on the slowest type.
        valid = own & (rates > 0) & (workers >= low)
        has = valid.any(axis=1)
        at = valid.argmax(axis=1)
        first = np.where(has, np.minimum(first, rates[np.arange(len(views)), at]), first)
    rate = np.where(np.isfinite(first), first, 0.0)
    return _relative(rates, rate, workers), rate


def _relative(rates: Floats, rate: Floats, workers: Ints) -> Floats:
    """Speeds; linear in the workers where there is no model."""
    base = np.where(rate > 0, rate, 1.0)[:, np.newaxis]
    return np.where(np.isnan(rates), workers.astype(np.float64), rates / base)
