"""Choice of one option per job that maximises the sum of values, by dual prices instead of an integer program.

Lagrangian decomposition (Everett, "Generalized Lagrange multiplier method", Operations Research 1963): with a price on
every GPU, the jobs no longer depend on each other. Each job picks the option with the largest value - price x size, and
the price is found by bisection. Remaining capacity is filled greedily. Small cases that are still too far from the
bound are solved exactly by dynamic programming.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

from placement.goodput.step_time import Floats

Ints = NDArray[np.int64]

_HALVINGS = 30
_PRECISION = 1e-4  # of a price: jobs that would answer otherwise within it are as well off either way
_PASSES = 12  # over the GPU types, whose prices depend on each other
GAP = 0.003  # part of the bound that may be missing before a small case is solved exactly
_EXACT = 60_000, 2_000_000  # jobs x options x slots (of every type) up to which that is worth its milliseconds;
# with several types prices alone may miss several per cent of a small case, with one they hardly ever do
_PAIRED = 24  # jobs up to which every pair of them is tried, where there are several types
_TINY = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of J jobs, C for each job; every option has a value, and a size on one of K GPU types."""

    values: Floats  # worth of each option, (J, C); -inf where it is not possible
    sizes: Floats  # what it takes, (J, C), 0 or more
    pool_of: Ints  # of which GPU type, (J, C), 0 to K - 1
    capacities: Floats  # what there is of each type, (K,)
    base: Ints  # one option per job, (J,), that fit together; no job gets an option that is not possible

    def __post_init__(self) -> None:
        if not self.values.shape == self.sizes.shape == self.pool_of.shape:
            raise ValueError(
                "values, sizes and pool_of must have one shape, "
                f"but got {self.values.shape}, {self.sizes.shape} and {self.pool_of.shape}"
            )
        used = self.used(self.base)
        if (used > self.capacities + _TINY).any():
            raise ValueError(f"base must fit into the capacities {self.capacities}, but takes {used}")

    def used(self, picks: Ints) -> Floats:
        """Return how much of each GPU type the picked options use, (K,); ``picks`` is each job's option index, (J,)."""
        rows = np.arange(len(picks))
        sizes = self.sizes[rows, picks].astype(np.float64)
        taken: Floats = np.bincount(self.pool_of[rows, picks], sizes, len(self.capacities)).astype(np.float64)
        return taken

    def worth(self, picks: Ints) -> float:
        """Return the total value of the picked options; ``picks`` is each job's option index, (J,)."""
        return float(self.values[np.arange(len(picks)), picks].sum())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Chosen option of each job, (J,), and the dual price (Lagrange multiplier) per unit of each GPU type, (K,)."""

    picks: Ints
    multipliers: Floats


def solve(options: Options, near: Floats | None = None, *, polished: bool = True) -> Solution:
    """Return one option per job, such that all fit together and their total value is nearly the highest possible.

    The remaining capacity cannot be used to increase the total. Ties go to the first option. The result is
    deterministic.

    Args:
        polished: True to improve a small case further if its sum is too far below the bound.
    """
    if not options.values.size:
        return Solution(
            picks=np.zeros(len(options.base), dtype=np.int64), multipliers=np.zeros(len(options.capacities))
        )
    multipliers = find_multipliers(options, near)
    wanted: Ints = np.argmax(options.values - multipliers[options.pool_of] * options.sizes, axis=1)
    picks = _realise(options, wanted)
    picks = fill(options, picks)
    if polished and bound(options, multipliers) - options.worth(picks) > GAP * _spread(options):
        whole = bool((options.sizes == np.rint(options.sizes)).all())
        if (
            whole
            and float(np.prod(options.capacities + 1)) * options.values.size <= _EXACT[len(options.capacities) > 1]
        ):
            picks = max((picks, solve_exactly(options)), key=options.worth)
        elif len(options.capacities) > 1 and len(picks) <= _PAIRED:
            picks = fill(options, _exchange(options, picks))
    return Solution(picks=picks, multipliers=multipliers)


def bound(options: Options, multipliers: Floats) -> float:
    """Return an upper bound on the total value, by duality: sum of max(value - price x size) + price x capacity."""
    net = options.values - multipliers[options.pool_of] * options.sizes
    return float(net.max(axis=1).sum() + multipliers @ options.capacities)


def _spread(options: Options) -> float:
    """Return the largest possible gain of the decision: each job's best option minus its base option, summed."""
    return float(options.values.max(axis=1).sum() - options.worth(options.base))


def find_multipliers(options: Options, near: Floats | None = None) -> Floats:
    """Return the lowest prices that keep demand within the capacity of every GPU type.

    Prices are found for one type at a time, in repeated passes, since a rising price moves jobs to other types. In
    later passes prices only rise, as in an ascending auction, until each type has room for its demand.
    """
    pools = len(options.capacities)
    multipliers = np.zeros(pools) if near is None else near.copy()
    for each_pass in range(_PASSES if pools > 1 else 1):
        before = multipliers.copy()
        rising = each_pass >= _PASSES // 2
        for pool in range(pools):
            multipliers[pool] = max(_find_multiplier(options, multipliers, pool), multipliers[pool] if rising else 0.0)
        if each_pass and np.allclose(before, multipliers, rtol=10 * _PRECISION, atol=1e-12):
            break
    return multipliers


def _find_multiplier(options: Options, multipliers: Floats, pool: int) -> float:
    """Return one price, found by bisection from its previous value, with all other prices fixed.

    The higher the price, the less each job requests. A job that requests the same at both ends of the interval also
    does so in between, so it is counted once; after the first few steps, only a few jobs are evaluated.
    """
    capacity = options.capacities[pool] + _TINY
    here = options.pool_of == pool
    size = np.where(here, options.sizes, 0.0)
    rest = options.values - np.where(here, 0.0, multipliers[options.pool_of]) * options.sizes
    high = max(float(multipliers[pool]), 1e-6)
    low = high * (1.0 - 5 * _PRECISION)
    at_low, at_high = _asked(rest, size, low), _asked(rest, size, high)
    for _ in range(100):
        if at_high.sum() <= capacity:
            break
        low, high, at_low = high, 2 * high, at_high
        at_high = _asked(rest, size, high)
    while at_low.sum() <= capacity:
        if low == 0.0:
            return 0.0
        low, high, at_high = (low / 2 if low > 1e-6 else 0.0), low, at_low
        at_low = _asked(rest, size, low)
    for _ in range(_HALVINGS):
        if high - low <= 10 * _PRECISION * high:
            break
        differ = at_low != at_high
        if 2 * np.count_nonzero(differ) <= len(differ):
            capacity -= at_high[~differ].sum()
            rest, size, at_low, at_high = (x[differ] for x in (rest, size, at_low, at_high))
        middle = (low + high) / 2
        at_middle = _asked(rest, size, middle)
        if at_middle.sum() <= capacity:
            high, at_high = middle, at_middle
        else:
            low, at_low = middle, at_middle
    return high


def _asked(rest: Floats, size: Floats, multiplier: float) -> Floats:
    """Return how much of one GPU type each job requests at this price."""
    asked: Floats = size[np.arange(len(rest)), np.argmax(rest - multiplier * size, axis=1)]
    return asked


def _realise(options: Options, wanted: Ints) -> Ints:
    """Move jobs from their base options to their wanted ones if that fits, the largest gain per size first."""
    used = options.used(wanted)
    if (used <= options.capacities + _TINY).all():
        return wanted
    picks = options.base.copy()
    left = options.capacities - options.used(picks)
    rows = np.arange(len(picks))
    gain = options.values[rows, wanted] - options.values[rows, picks]
    movers = [
        int(j)
        for j in np.argsort(-gain / np.maximum(options.sizes[rows, wanted], _TINY), kind="stable")
        if wanted[j] != picks[j]
    ]
    moved = True
    while moved and movers:
        moved = False
        for j in list(movers):
            old, new = picks[j], wanted[j]
            left[options.pool_of[j, old]] += options.sizes[j, old]
            if options.sizes[j, new] <= left[options.pool_of[j, new]] + _TINY:
                picks[j] = new
                movers.remove(j)
                moved = True
            left[options.pool_of[j, picks[j]]] -= options.sizes[j, picks[j]]
    return picks


def fill(options: Options, picks: Ints) -> Ints:
    """Return the picks (option per job) after filling spare capacity while it adds value, best gain per size first."""
    picks = picks.copy()
    left = options.capacities - options.used(picks)
    # A job that leaves room gives others a chance: look again, which ends since every step adds.
    while _fill_once(options, picks, left):
        pass
    return picks


def _fill_once(options: Options, picks: Ints, left: Floats) -> bool:
    """Fill the remaining room once; return True if some job has freed room by changing its option."""
    rates, steps, needs = _best_steps(options, slice(None), picks, left)
    heap = [(-float(rates[j]), j, int(steps[j])) for j in np.flatnonzero(rates > -np.inf).tolist()]
    heapq.heapify(heap)
    freed = False
    while heap:
        _, j, option = heapq.heappop(heap)
        pool, size = options.pool_of[j, option], options.sizes[j, option]
        own = options.sizes[j, picks[j]] if options.pool_of[j, picks[j]] == pool else 0.0
        if size - own <= left[pool] + _TINY and options.values[j, option] > options.values[j, picks[j]] + _TINY:
            left[options.pool_of[j, picks[j]]] += options.sizes[j, picks[j]]
            left[pool] -= size
            freed = freed or options.pool_of[j, picks[j]] != pool or size < own
            picks[j] = option
        elif (needs[j] > left + _TINY).all():
            continue
        (rate,), (step,), (needs[j],) = _best_steps(options, slice(j, j + 1), picks, left)
        if rate > -np.inf:
            heapq.heappush(heap, (-float(rate), j, int(step)))
        elif (needs > left + _TINY).all():
            break  # no other job can, either
    return bool(freed)


def _best_steps(options: Options, rows: slice, picks: Ints, left: Floats) -> tuple[Floats, Ints, Floats]:
    """Return, for each job, the option that fits and has the largest gain per size.

    Returns three arrays: the gain per size, or -inf if no option that fits adds anything; the option; and how much of
    each GPU type the job needs before any option adds something, (J, K).
    """
    values, sizes, pool_of = options.values[rows], options.sizes[rows], options.pool_of[rows]
    every, own = np.arange(len(values)), picks[rows]
    own_pool, own_size, own_value = (x[every, own][:, np.newaxis] for x in (pool_of, sizes, values))
    extra = sizes - np.where(pool_of == own_pool, own_size, 0.0)
    with np.errstate(invalid="ignore"):
        gain = values - own_value
    adds = gain > _TINY
    needs = [np.where(adds & (pool_of == pool), extra, np.inf).min(axis=1) for pool in range(len(left))]
    rate = np.where(adds & (extra <= left[pool_of] + _TINY), gain / np.maximum(extra, _TINY), -np.inf)
    best = np.argmax(rate, axis=1)
    return rate[every, best], best, np.stack(needs, axis=1)


def _exchange(options: Options, picks: Ints) -> Ints:
    """Let pairs of jobs choose again jointly while that raises their total value; inexact, helps with several types."""
    picks = picks.copy()
    left = options.capacities - options.used(picks)
    pools = np.arange(len(left))
    takes = np.where(options.pool_of[:, :, np.newaxis] == pools, options.sizes[:, :, np.newaxis], 0.0)
    improved = True
    while improved:
        improved = False
        for i, j in itertools.combinations(range(len(picks)), 2):
            room = left + takes[i, picks[i]] + takes[j, picks[j]] + _TINY
            both = options.values[i][:, np.newaxis] + options.values[j]
            fits = (takes[i][:, np.newaxis] + takes[j] <= room).all(axis=2)
            a, b = np.unravel_index(int(np.argmax(np.where(fits, both, -np.inf))), both.shape)
            if both[a, b] > both[picks[i], picks[j]] + _TINY:
                left = room - _TINY - takes[i, a] - takes[j, b]
                picks[i], picks[j] = a, b
                improved = True
    return picks


def solve_exactly(options: Options) -> Ints:
    """Return each job's option index for the highest total value, (J,), by dynamic programming.

    f_j(g) = max over options o of value_j(o) + f_{j-1}(g - size_j(o)), with g one count of free slots per GPU type.
    """
    shape = tuple((np.floor(options.capacities + _TINY).astype(np.int64) + 1).tolist())
    best = np.zeros(shape)
    sizes = np.rint(options.sizes).astype(np.int64)
    choices: list[Ints] = []
    for j, values in enumerate(options.values):
        rows = np.full((len(values), *shape), -np.inf)
        for row, size, pool, value in zip(rows, sizes[j].tolist(), options.pool_of[j].tolist(), values, strict=True):
            if size < shape[pool] and value > -np.inf:
                np.moveaxis(row, pool, 0)[size:] = np.moveaxis(best, pool, 0)[: shape[pool] - size] + value
        choice: Ints = rows.argmax(axis=0)
        best = np.take_along_axis(rows, choice[np.newaxis], axis=0)[0]
        choices.append(choice)
    picks = options.base.copy()
    left = list(np.unravel_index(int(np.argmax(best)), shape))
    for j in range(len(choices) - 1, -1, -1):
        picks[j] = choices[j][tuple(left)]
        left[options.pool_of[j, picks[j]]] -= sizes[j, picks[j]]
    return picks
