"""Arrays for one decision: the speed and value of each option (a size in a GPU pool) for each job."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, WorkerKind, worker_kind
from placement.cluster.packing import FreeResources
from placement.goodput.remaining import concave_value, discount
from placement.goodput.speeds import GoodputCache, Ints, table
from placement.goodput.step_time import Floats

WorkersByIndex = Mapping[int, int]
"""Workers by index of the node within a pool."""
_EVERY = 8  # sizes up to here are all tried, and all up to a whole node
_FEW_NODES = 16  # beyond so many nodes, sizes grow by a fifth each instead of by a node


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement of a job: its GPU pool (nodes of one GPU type), and its workers keyed by node index."""

    pool: int = -1  # index; -1 is nowhere
    place: WorkersByIndex = dataclasses.field(default_factory=dict)  # workers per node index there
    workers: int = dataclasses.field(init=False, compare=False)  # workers altogether

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", sum(self.place.values()))


UNPLACED = Placement()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionTable:
    """Speeds of all jobs (J) in all options (C, each a size in a GPU pool), independent of where jobs currently are."""

    views: tuple[JobView, ...]  # the jobs, in the order of arrival
    pools: tuple[GpuPool, ...]  # GPU types
    worker_kinds: tuple[WorkerKind, ...]  # kind of each job's workers
    pool_of: Ints  # pool of each option, (C,)
    sizes: Ints  # workers of each option, (C,)
    regular: NDArray[np.bool_]  # whether an option leaves no scattered room, (C,)
    nodes: Ints  # the fewest nodes of each option, (J, C)
    possible: NDArray[np.bool_]  # whether the job may have the option, (J, C)
    speed: Floats  # goodput of each option over that of the smallest size, (J, C)
    rate: Floats  # goodput on the smallest size [samples/s], (J,); 0 without a model
    unit: Floats  # what one worker takes of a pool, (J, K): 1 where all workers are alike, else its dominant share
    capacities: Floats  # of each pool in these units, (K,)
    alike: bool  # whether the workers of all jobs are interchangeable, so that counting them is enough
    cache: GoodputCache  # of what was computed before

    def slots(self, job: int, pool: int) -> Ints:
        """Return how many workers of the job fit on each node of the pool when empty; both arguments are indices."""
        return self.pools[pool].slots[self.worker_kinds[job]]

    def speed_at(self, placements: Sequence[Placement]) -> Floats:
        """Return each job's speed at its placement, relative to its smallest size, (J,); 0 without workers."""
        speed = np.zeros(len(placements))
        if not len(self.sizes):
            return speed
        found = [
            (j, placement.pool, placement.workers, len(placement.place))
            for j, placement in enumerate(placements)
            if placement.place
        ]
        rows, pool_of, workers, spread = np.array(found, dtype=np.int64).reshape(len(found), 4).T
        option = self._option(pool_of, workers)
        listed = (option >= 0) & (self.nodes[rows, option] == spread)
        speed[rows[listed]] = self.speed[rows[listed], option[listed]]
        for m, pool in enumerate(self.pools):
            other = (pool_of == m) & ~listed
            if other.any():
                j, size = rows[other], workers[other, np.newaxis]
                views = [self.views[row] for row in j.tolist()]
                rates = table(views, pool.gpu, spread[other, np.newaxis], size, self.cache)
                speed[j] = _relative(rates, self.rate[j], size)[:, 0]
        return speed

    def _option(self, pool_of: Ints, workers: Ints) -> Ints:
        """Return the index of the option with each pool and size, or -1 if there is no such option."""
        most = int(max(self.sizes.max(), workers.max(initial=0)))
        index = np.full((len(self.pools) + 1, most + 1), -1, dtype=np.int64)
        index[self.pool_of, self.sizes] = np.arange(len(self.sizes))
        found: Ints = index[pool_of, workers]
        return found


def useful(view: JobView, gpu: str) -> int:
    """Return the largest number of workers that the job can use on this GPU type, at least its minimum.

    Like ``JobView.useful_workers``, but with the batch limits of the GPU type and the job's growth limit.
    """
    most = view.max_workers
    batch = view.max_batch_size if view.max_batch_size is not None else view.init_batch_size
    bounds = view.atomic_bsz_ranges.get(gpu, view.atomic_bsz_range)
    if batch is not None:
        most = min(most, batch // (bounds[0] if bounds else 1))
    if view.goodput is None:
        most = min(most, view.explored_workers)
    if view.growth_limit is not None:
        most = min(most, max(view.growth_limit, view.workers))
    return max(view.sizes.at_most(max(most, 0)), view.min_workers)


def _allowed(views: Sequence[JobView], sizes: Ints) -> NDArray[np.bool_]:
    """Return a mask of the sizes that each job can train with, (J, C)."""
    allowed = np.ones((len(views), len(sizes)), dtype=np.bool_)
    for j, view in enumerate(views):
        if not view.sizes.free and len(sizes):
            allowed[j] = view.sizes.floors(int(sizes.max()))[sizes] == sizes
    return allowed


def build(jobs: Sequence[JobView], cluster: Cluster, cache: GoodputCache | None = None) -> OptionTable:
    """Return the option table for a decision about these jobs; ``cache`` holds results of earlier decisions."""
    cache = GoodputCache() if cache is None else cache
    views = tuple(sorted(jobs, key=lambda view: view.arrival))
    worker_kinds = tuple(worker_kind(view) for view in views)
    samples = dict(zip(worker_kinds, views, strict=True))
    number = {kind: i for i, kind in enumerate(samples)}
    which = np.array([number[kind] for kind in worker_kinds], dtype=np.int64)
    pools = split(cluster, samples)
    alike = len(samples) <= 1
    pool_of, sizes, regular, most = [], [], [], np.zeros((len(views), len(pools)), dtype=np.int64)
    totals = _by_worker_kind([[pool.slots[kind].sum() for pool in pools] for kind in samples], which, len(pools))
    must = {size for view in views for size in (view.min_workers, view.held_at or 0)}
    room = int(totals.max(initial=0))
    for view in views:
        must |= set() if view.sizes.free else set(view.sizes.floors(min(view.max_workers, room)).tolist())
    for m, pool in enumerate(pools):
        most[:, m] = [useful(view, pool.gpu) for view in views]
        node = max((int(slots.max(initial=0)) for slots in pool.slots.values()), default=0)
        extra = set(np.minimum(most[:, m], totals[:, m].astype(np.int64)).tolist()) if len(views) <= 256 else set()
        total = int(totals[:, m].max(initial=0))
        offered = size_grid(node, total, max(int(most[:, m].max(initial=0)), 1), extra | must)
        pool_of.append(np.full(len(offered.sizes), m, dtype=np.int64))
        sizes.append(offered.sizes)
        regular.append(offered.regular)
    empty = np.zeros(0, dtype=np.int64)
    all_pools, all_sizes = np.concatenate([empty, *pool_of]), np.concatenate([empty, *sizes])
    nodes = _nodes(samples, pools, sizes)[which]
    low = np.array([view.min_workers for view in views], dtype=np.int64)[:, np.newaxis]
    possible = (nodes > 0) & (all_sizes >= low) & (all_sizes <= most[:, all_pools]) & _allowed(views, all_sizes)
    speed, rate = _speeds(views, pools, nodes, all_pools, all_sizes, low, cache)
    unit = np.ones_like(totals)
    if not alike:
        unit = _by_worker_kind([[pool.shares[kind] for pool in pools] for kind in samples], which, len(pools))
    return OptionTable(
        views=views,
        pools=pools,
        worker_kinds=worker_kinds,
        pool_of=all_pools,
        sizes=all_sizes,
        regular=np.concatenate([np.zeros(0, dtype=np.bool_), *regular]),
        nodes=nodes,
        possible=possible,
        speed=speed,
        rate=rate,
        unit=unit,
        capacities=totals[0] if alike and len(views) else np.ones(len(pools)),
        alike=alike,
        cache=cache,
    )


def _by_worker_kind(numbers: Sequence[Sequence[float]], which: Ints, width: int) -> Floats:
    """Return one row per job, copied from the row for the job's worker kind."""
    rows: Floats = np.array(numbers, dtype=np.float64).reshape(len(numbers), width)[which]
    return rows


def _nodes(worker_kinds: Collection[WorkerKind], pools: Sequence[GpuPool], sizes: Sequence[Ints]) -> Ints:
    """Return the fewest nodes that each option needs, one row per worker kind."""
    rows = [[nodes_needed(m.slots[kind], s) for m, s in zip(pools, sizes, strict=True)] for kind in worker_kinds]
    empty = np.zeros(0, dtype=np.int64)
    return np.array([np.concatenate([empty, *row]) for row in rows]).reshape(len(rows), sum(map(len, sizes)))


def _speeds(
    views: Sequence[JobView],
    pools: Sequence[GpuPool],
    nodes: Ints,
    pool_of: Ints,
    sizes: Ints,
    low: Ints,
    cache: GoodputCache,
) -> tuple[Floats, Floats]:
    """Return each option's speed, and each job's goodput at its smallest size [samples/s], 0 without a model."""
    rates = np.full(nodes.shape, np.nan)
    if not nodes.size:
        return rates, np.zeros(len(views))
    first = np.full(len(views), np.inf)
    workers = np.broadcast_to(sizes, nodes.shape)
    for m, pool in enumerate(pools):
        own = pool_of == m
        rates[:, own] = table(views, pool.gpu, nodes[:, own], workers[:, own], cache)
        # The yardstick is the smallest size that runs at all, on the slowest type.
        valid = own & (rates > 0) & (workers >= low)
        has = valid.any(axis=1)
        at = valid.argmax(axis=1)
        first = np.where(has, np.minimum(first, rates[np.arange(len(views)), at]), first)
    rate = np.where(np.isfinite(first), first, 0.0)
    return _relative(rates, rate, workers), rate


def _relative(rates: Floats, rate: Floats, workers: Ints) -> Floats:
    """Return goodputs relative to the base rate; without a model, the speed is the number of workers."""
    base = np.where(rate > 0, rate, 1.0)[:, np.newaxis]
    return np.where(np.isnan(rates), workers.astype(np.float64), rates / base)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuPool:
    """Nodes of one GPU type that are not draining."""

    gpu: str  # the type, empty where nodes do not say
    cluster: Cluster
    node_ids: tuple[str, ...]  # their ids, in the order of every array over nodes
    slots: dict[WorkerKind, Ints]  # by kind of worker, how many such workers each node could hold if it were empty
    # by kind of worker, dominant share of one worker: the largest part of any resource of the pool that it takes
    shares: dict[WorkerKind, float]


def split(cluster: Cluster, samples: Mapping[WorkerKind, JobView]) -> tuple[GpuPool, ...]:
    """Return the cluster's pools of nodes, one per GPU type, sorted; ``samples`` maps each kind of worker to a job."""
    groups: dict[str, list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        if not node.draining:
            groups.setdefault(node.gpu_type, []).append(index)
    pools = []
    for gpu, indices in sorted(groups.items()):
        part = Cluster(nodes=tuple(cluster.nodes[i] for i in indices))
        room = FreeResources(part)
        slots = {kind: room.slots(view) for kind, view in samples.items()}
        shares = {kind: room.share(view) for kind, view in samples.items()}
        pools.append(GpuPool(gpu=gpu, cluster=part, node_ids=room.node_ids, slots=slots, shares=shares))
    return tuple(pools)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeGrid:
    """Sizes that jobs may have in one pool, in ascending order."""

    sizes: Ints  # workers
    # powers of two within a node, whole nodes, and whatever some job must have: sizes that leave no scattered room. The
    # others are for filling up.
    regular: NDArray[np.bool_]


def size_grid(node: int, total: int, most: int, extra: Iterable[int]) -> SizeGrid:
    """Return the sizes to consider in one pool (nodes of one GPU type)."""
    top = min(total, most)
    wanted = tuple(sorted({size for size in extra if 1 <= size <= top}))
    return _size_grid(node, top, wanted)


@functools.lru_cache(maxsize=256)
def _size_grid(node: int, top: int, wanted: tuple[int, ...]) -> SizeGrid:
    """Return the grid up to ``top``; cached, since decisions request the same few grids repeatedly."""
    regular = set(wanted)
    size = 1
    while size <= min(node, top):
        regular.add(size)
        size *= 2
    nodes = 1
    while node and nodes * node <= top:
        regular.add(nodes * node)
        nodes += 1 if nodes < _FEW_NODES else max(1, nodes // 5)
    sizes = sorted(regular | set(range(1, min(max(_EVERY, node), top) + 1)))
    return SizeGrid(
        sizes=np.array(sizes, dtype=np.int64), regular=np.array([s in regular for s in sizes], dtype=np.bool_)
    )


def nodes_needed(slots: Ints, sizes: Ints) -> Ints:
    """Return the fewest nodes that hold each number of workers, given each node's ``slots``; 0 if they do not fit."""
    roomy = np.cumsum(-np.sort(-slots))
    if not len(roomy):
        return np.zeros_like(sizes)
    return np.where(sizes <= roomy[-1], np.searchsorted(roomy, sizes) + 1, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeedValue:
    """Value of each job's speed in a decision; each parameter has one entry per job, (J,), or is one number for all."""

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
        """Return the parameters for GPUs that no other job can use, so that a pause costs only the job that pauses."""
        return dataclasses.replace(self, charge=0.0, arrivals_per_s=0.0, growth_hysteresis=self.hysteresis)

    def of(self, jobs: NDArray[np.int64]) -> SpeedValue:
        """Return the parameters restricted to the jobs with these indices."""
        parts = {name: getattr(self, name)[jobs] for name in ("weight", "left_s", "cost_s", "stop_s", "horizon_s")}
        return dataclasses.replace(self, **parts)

    def values(self, speed: Floats, fewer: NDArray[np.bool_], same: NDArray[np.bool_]) -> Floats:
        """Return the value of each job's speed in each option, minus the cost of changing to that option, (J, C).

            weight x phi(speed) - max(weight, charge) x (phi(speed) - phi(speed x discount))

        A stop is worth weight x (phi(0) + phi(discount)), since the job pauses when it starts again at speed 1. phi is
        ``concave_value``.

        Args:
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
    """Return (minus the weight of jobs that ``placements`` do not run, sum of the others' values); larger is better.

    Args:
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
