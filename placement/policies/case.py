"""One decision's question in arrays: J jobs, C options (a size in a market), and how fast each job is in each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster
from placement.goodput_table import Ints
from placement.jobs import FIRST_WORKERS, JobView
from placement.policies.markets import Breed, Market, breed, menu, nodes_needed, split
from placement.policies.speeds import Memory, table
from placement.throughput import Floats

Place = Mapping[int, int]
"""Workers by index of the node within a market."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a job is: a market and workers per node index there; market -1 is nowhere."""

    market: int = -1
    place: Place = dataclasses.field(default_factory=dict)

    @property
    def workers(self) -> int:
        """Workers altogether."""
        return sum(self.place.values()) if self.place else 0


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
    memory: Memory

    @property
    def alike(self) -> bool:
        """Whether the workers of all jobs are interchangeable, so that counting them is enough."""
        return len(set(self.breeds)) <= 1

    def slots(self, job: int, market: int) -> Ints:
        """How many of the job's workers each node of the market could hold if it were empty."""
        return self.markets[market].slots[self.breeds[job]]

    def speed_at(self, seats: Sequence[Seat]) -> Floats:
        """Speed of each job where it is, (J,); 0 for those that are nowhere."""
        speed = np.zeros(len(seats))
        if not len(self.sizes):
            return speed
        kinds = np.array([seat.market for seat in seats], dtype=np.int64)
        workers = np.array([seat.workers for seat in seats], dtype=np.int64)
        spread = np.array([len(seat.place) for seat in seats], dtype=np.int64)
        option = self._option(kinds, workers)
        rows = np.arange(len(seats))
        listed = (option >= 0) & (self.nodes[rows, option] == spread) & (workers > 0)
        speed[listed] = self.speed[rows[listed], option[listed]]
        for m, market in enumerate(self.markets):
            others = np.flatnonzero((kinds == m) & (workers > 0) & ~listed)
            if len(others):
                size = workers[others, np.newaxis]
                rates = table([self.views[j] for j in others], market.gpu, spread[others, np.newaxis], size, self.memory)
                speed[others] = _relative(rates, self.rate[others], size)[:, 0]
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
    markets = split(cluster, views)
    alike = len(set(breeds)) <= 1
    kinds, sizes, regular, most = [], [], [], np.zeros((len(views), len(markets)), dtype=np.int64)
    totals = np.array([[market.slots[kind].sum() for market in markets] for kind in breeds], dtype=np.float64)
    totals = totals.reshape(len(views), len(markets))
    for m, market in enumerate(markets):
        most[:, m] = [useful(view, market.gpu) for view in views]
        node = max((int(slots.max(initial=0)) for slots in market.slots.values()), default=0)
        extra = {size for view in views for size in (view.min_workers, view.held_at or 0)}
        extra |= set(np.minimum(most[:, m], totals[:, m].astype(np.int64)).tolist()) if len(views) <= 256 else set()
        total = int(totals[:, m].max(initial=0))
        offered = menu(node, total, max(int(most[:, m].max(initial=0)), 1), extra)
        kinds.append(np.full(len(offered.sizes), m, dtype=np.int64))
        sizes.append(offered.sizes)
        regular.append(offered.regular)
    empty = np.zeros(0, dtype=np.int64)
    all_kinds, all_sizes = np.concatenate([empty, *kinds]), np.concatenate([empty, *sizes])
    nodes = _nodes(breeds, markets, sizes)
    low = np.array([view.min_workers for view in views], dtype=np.int64)[:, np.newaxis]
    possible = (nodes > 0) & (all_sizes >= low) & (all_sizes <= most[:, all_kinds])
    speed, rate = _speeds(views, markets, nodes, all_kinds, all_sizes, low, memory)
    unit = np.ones_like(totals)
    if not alike:
        unit = np.array([[market.shares[kind] for market in markets] for kind in breeds], dtype=np.float64)
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
        memory=memory,
    )


def _nodes(breeds: Sequence[Breed], markets: Sequence[Market], sizes: Sequence[Ints]) -> Ints:
    """Fewest nodes of every option for every job, (J, C)."""
    rows = {
        kind: np.concatenate(
            [
                np.zeros(0, dtype=np.int64),
                *(nodes_needed(m.slots[kind], s) for m, s in zip(markets, sizes, strict=True)),
            ]
        )
        for kind in set(breeds)
    }
    return np.array([rows[kind] for kind in breeds], dtype=np.int64).reshape(len(breeds), sum(map(len, sizes)))


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
