"""One option for each job so that the sum of values is largest: a price per GPU type instead of an integer program.

Lagrangian decomposition (Everett, "Generalized Lagrange multiplier method", Operations Research 1963): with a price
on every GPU the jobs no longer depend on each other, each takes argmax of value - price x size, and the price is
found by bisection. What the prices leave over is filled greedily; small cases whose bound is not met are solved
exactly by dynamic programming.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

from placement.throughput import Floats

Ints = NDArray[np.int64]

_HALVINGS = 30  # a price is known to 1e-9 of the largest
_SWEEPS = 12  # over the GPU types, whose prices depend on each other
_GAP = 0.003  # part of the bound that may be missing before a small case is solved exactly
_EXACT = 60_000, 2_000_000  # jobs x options x slots (of every type) up to which that is worth its milliseconds;
# with several types prices alone may miss several per cent of a small case, with one they hardly ever do
_PAIRED = 24  # jobs up to which every pair of them is tried, where there are several types
_TINY = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What every job may have; J jobs, C options, K GPU types.

    Attributes:
        values: worth of each option, (J, C); -inf where it is not possible.
        sizes: what it takes, (J, C), 0 or more.
        kinds: of which GPU type, (J, C), 0 to K - 1.
        capacities: what there is of each type, (K,).
        base: one option per job, (J,), that fit together; nobody gets an option that is worth less than -inf.
    """

    values: Floats
    sizes: Floats
    kinds: Ints
    capacities: Floats
    base: Ints

    def __post_init__(self) -> None:
        if not self.values.shape == self.sizes.shape == self.kinds.shape:
            raise ValueError(
                "values, sizes and kinds must have one shape, "
                f"but got {self.values.shape}, {self.sizes.shape} and {self.kinds.shape}"
            )
        used = self.used(self.base)
        if (used > self.capacities + _TINY).any():
            raise ValueError(f"base must fit into the capacities {self.capacities}, but takes {used}")

    def used(self, picks: Ints) -> Floats:
        """What these options take of each type."""
        rows = np.arange(len(picks))
        sizes = self.sizes[rows, picks].astype(np.float64)
        taken: Floats = np.bincount(self.kinds[rows, picks], sizes, len(self.capacities)).astype(np.float64)
        return taken

    def worth(self, picks: Ints) -> float:
        """Sum of their values."""
        return float(self.values[np.arange(len(picks)), picks].sum())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The option of each job, (J,), and the price of a unit of each GPU type, (K,)."""

    picks: Ints
    prices: Floats


def solve(options: Options) -> Solution:
    """Options that fit together, with nearly the best sum of values, and nothing left that would add to it.

    Of equal options the first is taken. Deterministic.
    """
    if not options.values.size:
        return Solution(picks=np.zeros(len(options.base), dtype=np.int64), prices=np.zeros(len(options.capacities)))
    prices = find_prices(options)
    picks = _realise(options, _answers(options, prices))
    picks = fill(options, picks)
    if bound(options, prices) - options.worth(picks) > _GAP * _spread(options):
        whole = bool((options.sizes == np.rint(options.sizes)).all())
        if (
            whole
            and float(np.prod(options.capacities + 1)) * options.values.size <= _EXACT[len(options.capacities) > 1]
        ):
            picks = max((picks, _exact(options)), key=options.worth)
        elif len(options.capacities) > 1 and len(picks) <= _PAIRED:
            picks = fill(options, _exchange(options, picks))
    return Solution(picks=picks, prices=prices)


def bound(options: Options, prices: Floats) -> float:
    """No choice that fits is worth more: sum of (value - price x size) of every job's answer + price x capacity."""
    net = options.values - prices[options.kinds] * options.sizes
    return float(net.max(axis=1).sum() + prices @ options.capacities)


def _spread(options: Options) -> float:
    """What there is to decide about: the best of every job less its base."""
    return float(options.values.max(axis=1).sum() - options.worth(options.base))


def _answers(options: Options, prices: Floats) -> Ints:
    """What each job takes at these prices."""
    answers: Ints = np.argmax(options.values - prices[options.kinds] * options.sizes, axis=1)
    return answers


def find_prices(options: Options) -> Floats:
    """The lowest prices at which no type is asked for beyond its capacity, one type after the other, repeatedly.

    A price that rises sends jobs to the other types. After some sweeps prices only rise, as in an ascending
    auction, until every type has room for what is asked of it.
    """
    kinds = len(options.capacities)
    prices = np.zeros(kinds)
    for sweep in range(_SWEEPS if kinds > 1 else 1):
        before = prices.copy()
        rising = sweep >= _SWEEPS // 2
        for kind in range(kinds):
            prices[kind] = max(_find_price(options, prices, kind), prices[kind] if rising else 0.0)
        if sweep and np.allclose(before, prices, rtol=1e-6, atol=1e-12):
            break
    return prices


def _find_price(options: Options, prices: Floats, kind: int) -> float:
    """Bisection on one price, the others given."""
    capacity = options.capacities[kind] + _TINY
    here = options.kinds == kind
    size = np.where(here, options.sizes, 0.0)
    rest = options.values - np.where(here, 0.0, prices[options.kinds]) * options.sizes
    rows = np.arange(len(rest))

    def fits(price: float) -> bool:
        return bool(size[rows, np.argmax(rest - price * size, axis=1)].sum() <= capacity)

    if fits(0.0):
        return 0.0
    low, high = 0.0, max(float(prices[kind]), 1e-6)
    for _ in range(100):
        if fits(high):
            break
        low, high = high, 4 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
        if high - low <= 1e-7 * high:
            break
    return high


def _realise(options: Options, wanted: Ints) -> Ints:
    """Move every job from its base to what it wants, as far as that fits, the largest gain per size first."""
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
            left[options.kinds[j, old]] += options.sizes[j, old]
            if options.sizes[j, new] <= left[options.kinds[j, new]] + _TINY:
                picks[j] = new
                movers.remove(j)
                moved = True
            left[options.kinds[j, picks[j]]] -= options.sizes[j, picks[j]]
    return picks


def fill(options: Options, picks: Ints) -> Ints:
    """Use what is left where it adds most per size, until nothing that fits adds anything."""
    picks = picks.copy()
    left = options.capacities - options.used(picks)
    # A job that changes its type leaves room that others may use: look again, which ends since every step adds.
    while hopeful := _hopeful(options, picks, left):
        _fill_once(options, picks, left, hopeful)
    return picks


def _fill_once(options: Options, picks: Ints, left: Floats, hopeful: list[int]) -> None:
    heap: list[tuple[float, int, int]] = []

    def offer(j: int) -> None:
        step = _best_step(options, j, int(picks[j]), left)
        if step is not None:
            heapq.heappush(heap, (-step[0], j, step[1]))

    for j in hopeful:
        offer(j)
    while heap:
        _, j, option = heapq.heappop(heap)
        kind, size = options.kinds[j, option], options.sizes[j, option]
        own = options.sizes[j, picks[j]] if options.kinds[j, picks[j]] == kind else 0.0
        if size - own <= left[kind] + _TINY and options.values[j, option] > options.values[j, picks[j]] + _TINY:
            left[options.kinds[j, picks[j]]] += options.sizes[j, picks[j]]
            left[kind] -= size
            picks[j] = option
        offer(j)


def _hopeful(options: Options, picks: Ints, left: Floats) -> list[int]:
    """Jobs for which something that fits is worth more than what they have."""
    rows = np.arange(len(picks))
    own_kind, own_size = options.kinds[rows, picks], options.sizes[rows, picks]
    extra = options.sizes - np.where(options.kinds == own_kind[:, np.newaxis], own_size[:, np.newaxis], 0.0)
    better = options.values > options.values[rows, picks][:, np.newaxis] + _TINY
    found: list[int] = np.flatnonzero((better & (extra <= left[options.kinds] + _TINY)).any(axis=1)).tolist()
    return found


def _best_step(options: Options, j: int, pick: int, left: Floats) -> tuple[float, int] | None:
    """The option that fits and adds most per size, and what it adds; None if none adds anything."""
    values, sizes, kinds = options.values[j], options.sizes[j], options.kinds[j]
    extra = sizes - np.where(kinds == kinds[pick], sizes[pick], 0.0)
    with np.errstate(invalid="ignore"):
        gain = values - values[pick]
    fits = (gain > _TINY) & (extra <= left[kinds] + _TINY)
    if not fits.any():
        return None
    rate = np.where(fits, gain / np.maximum(extra, _TINY), -np.inf)
    best = int(np.argmax(rate))
    return float(rate[best]), best


def _exchange(options: Options, picks: Ints) -> Ints:
    """Let any two jobs choose anew together while that adds to their sum: better for several types, not exact."""
    picks = picks.copy()
    left = options.capacities - options.used(picks)
    kinds = np.arange(len(left))
    takes = np.where(options.kinds[:, :, np.newaxis] == kinds, options.sizes[:, :, np.newaxis], 0.0)
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


def _exact(options: Options) -> Ints:
    """f_j(g) = max over options o of value_j(o) + f_{j-1}(g - size_j(o)), g one count per type: the best sum."""
    shape = tuple((np.floor(options.capacities + _TINY).astype(np.int64) + 1).tolist())
    best = np.zeros(shape)
    sizes = np.rint(options.sizes).astype(np.int64)
    choices: list[Ints] = []
    for j, values in enumerate(options.values):
        rows = np.full((len(values), *shape), -np.inf)
        for row, size, kind, value in zip(rows, sizes[j].tolist(), options.kinds[j].tolist(), values, strict=True):
            if size < shape[kind] and value > -np.inf:
                np.moveaxis(row, kind, 0)[size:] = np.moveaxis(best, kind, 0)[: shape[kind] - size] + value
        choice: Ints = rows.argmax(axis=0)
        best = np.take_along_axis(rows, choice[np.newaxis], axis=0)[0]
        choices.append(choice)
    picks = options.base.copy()
    left = list(np.unravel_index(int(np.argmax(best)), shape))
    for j in range(len(choices) - 1, -1, -1):
        picks[j] = choices[j][tuple(left)]
        left[options.kinds[j, picks[j]]] -= sizes[j, picks[j]]
    return picks
