"""Division of an epoch's samples among ranks: pure arithmetic, the same on every rank.

An epoch is an *order* of ``total`` indices, fixed by the seed and the epoch alone. Progress within it is one
number, ``position``: how many samples of that order committed steps have used. World size, batch size and
accumulation decide only how the *next* global batch ``order[position : position + step_size(...)]`` is cut
up, never which samples are left. Hence every sample is used exactly once per epoch however the job grows,
shrinks or fails; a step that failed is drawn again by calling the same functions with the same position.

Where evaluation keeps batches whole, they lie one after the other in that order; batch ``b`` ends at sample
``ends[b]``. A step takes the next ``world_size`` batches, one for each rank, so position is always the end of a batch,
and a group of any size can continue from it. Only the last step may have fewer batches than ranks; its last ranks have
none.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

_ROUNDS = 64  # of bisection: more than a double has bits
_LEAST = 2  # samples of a micro-batch: BatchNorm cannot do with one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Weights of ranks for unequal shares of a step, with the least and most samples of a rank.

    Raises ValueError: a weight is not above 0 and finite, or a bound is below 1.
    """

    # of the ranks, each above 0; a rank of weight 0.5 takes half as many samples as one of weight 1
    weights: tuple[float, ...]
    least: int = 1  # fewest samples of a micro-batch, where an equal split has so many
    most: int | None = None  # most samples of a micro-batch, where an equal split has no more; None for no bound

    def __post_init__(self) -> None:
        if not self.weights or any(not (weight > 0 and math.isfinite(weight)) for weight in self.weights):
            raise ValueError(f"weights must hold a number above 0 for each rank, but got {self.weights}")
        for name in ("least", "most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 sample or more, but got {value}")


def by_weight(count: int, shares: Shares, micro_steps: int) -> list[int]:
    """Return the samples of each rank, so that the largest of samples / weight is as small as it can be.

    With weights in proportion to the ranks' speeds this is the cut with the shortest step (Jefferson's method of
    apportionment within bounds). Equal weights give the equal split, larger shares first.

    Args:
        count: samples of the step, at least ranks x micro_steps.
        micro_steps: micro-batches of each rank; every one gets a sample at least.

    Returns one size of ``micro_steps`` or more for each rank; together they are ``count``.
    """
    ranks = len(shares.weights)
    even = count // (ranks * micro_steps)
    low = micro_steps * max(1, min(max(shares.least, _LEAST), even))
    high = count if shares.most is None else max(micro_steps * shares.most, -(-count // ranks))

    def sizes(times: float) -> list[int]:
        return [max(low, min(high, int(times * weight))) for weight in shares.weights]

    short, long = 0.0, count / min(shares.weights) + 1.0
    for _ in range(_ROUNDS):
        middle = (short + long) / 2.0
        short, long = (middle, long) if sum(sizes(middle)) <= count else (short, middle)
    found = sizes(short)
    for _ in range(count - sum(found)):
        _give_one(found, shares.weights, high)
    return found


def _give_one(sizes: list[int], weights: Sequence[float], high: int) -> None:
    """Give one more sample to the rank that has it done first."""
    open_ranks = [rank for rank, size in enumerate(sizes) if size < high]
    sizes[min(open_ranks, key=lambda rank: (sizes[rank] + 1) / weights[rank])] += 1


Indices = npt.NDArray[np.int64]

_ROUNDS, _SMALL, _SMALL_ROUNDS = 8, 1024, 24  # few cells mix slowly
_HALF = np.uint64(32)
_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)  # of well-known 64-bit mixers


class Order(Protocol):
    """Indices in the order of use, of which any part is available: an array, or an object that computes the part."""

    def __len__(self) -> int:
        """Return the number of indices."""
        ...

    def __getitem__(self, part: slice | Indices, /) -> Indices:
        """Return the indices at some positions."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """Indices 0..samples-1 in an order that depends on ``key`` alone; computed as they are asked for.

    >>> Permutation(samples=10**12, key="0 0")[7:10].tolist()
    [488436971634, 693908669537, 664861892677]
    """

    samples: int
    key: str = ""  # any text; equal texts give equal orders. Empty: they ascend.
    _keys: npt.NDArray[np.uint64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rounds = 0 if not self.key else _SMALL_ROUNDS if self.samples < _SMALL else _ROUNDS
        raw = hashlib.shake_256(self.key.encode()).digest(8 * rounds)
        object.__setattr__(self, "_keys", np.frombuffer(raw, "<u8").astype(np.uint64))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, part: slice | Indices | int) -> Indices:
        """Return the indices at ``part`` of the positions 0..samples-1; of one position a scalar."""
        if isinstance(part, int | np.integer):
            one: Indices = self[np.array([range(self.samples)[part]])][0]
            return one
        if not self.samples:
            return np.zeros(0, np.int64)[part]
        indices = self._through_rounds(positions(part, self.samples).astype(np.uint64))
        while len(outside := np.flatnonzero(indices >= np.uint64(self.samples))):
            indices[outside] = self._through_rounds(indices[outside])
        return indices.astype(np.int64)

    def _through_rounds(self, cells: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        rows = math.isqrt(self.samples - 1) + 1
        columns = -(-self.samples // rows)
        left, right = np.divmod(cells, np.uint64(columns))
        for number in range(0, len(self._keys), 2):
            left = _added(left, rows, _hashed(right, self._keys[number], rows))
            right = _added(right, columns, _hashed(left, self._keys[number + 1], columns))
        return left * np.uint64(columns) + right


def positions(part: slice | Indices, samples: int) -> Indices:
    """Return the positions that an index of a sequence of ``samples`` stands for."""
    return np.arange(*part.indices(samples), dtype=np.int64) if isinstance(part, slice) else part


def _added(one: npt.NDArray[np.uint64], size: int, other: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the sum modulo ``size`` of numbers below it."""
    total = one + other
    return total - np.uint64(size) * (total >= np.uint64(size))


def _hashed(values: npt.NDArray[np.uint64], key: np.uint64, size: int) -> npt.NDArray[np.uint64]:
    """Return a number below ``size`` for each value, by a multiplicative hash (products are taken modulo 2**64)."""
    mixed = (values + key) * _FACTORS[0]
    mixed ^= mixed >> _HALF
    mixed *= _FACTORS[1]
    return ((mixed >> _HALF) * np.uint64(size)) >> _HALF


def check_place(*, epoch: int, position: int) -> None:
    """Raise TypeError or ValueError unless these are an epoch, and how many of its samples steps have used."""
    _check_count("epoch", epoch, at_least=0)
    _check_count("position", position, at_least=0)


def epoch_key(*, seed: int, epoch: int) -> str:
    """Return the key of what is drawn for an epoch: the same on every rank."""
    _check_count("seed", seed, at_least=0)
    _check_count("epoch", epoch, at_least=0)
    return f"{seed} {epoch}"


def step_size(
    *, position: int, total: int, batch_size: int, world_size: int, drop_last: bool = False, least: int = 1
) -> int:
    """Return the size of the next global batch, with a sample for every rank in every step that can have one.

    Usually `batch_size`; 0 at the end of the epoch. If the batch would leave a leftover l with 1 <= l <
    2 world_size, this step takes ``batch_size - (2 world_size - l)``, so that each of several ranks has two samples
    in the last one (BatchNorm cannot do with one). Where that would leave this step itself fewer than that, one
    each must do: with l < world_size, which could not be shared out, it takes ``batch_size - (world_size - l)``, and
    where even that leaves it fewer than `world_size`, it takes the leftover along: ``batch_size + l``, at most one
    sample more per rank.
    With `drop_last` a tail shorter than `batch_size` is dropped (0), and no step is ever adapted.
    Where fewer samples are left than there are ranks, as in an evaluation over few, the step takes all of them: the
    first ranks have one each, the others none (see :func:`split`). A job that asks `can_switch` before a planned change
    comes to such a step only in a pass over fewer samples than ranks: a failure only makes the group smaller.

    Args:
        position: samples of the epoch's order used so far, 0..total.
        total: samples in the epoch's order.
        world_size: ranks that share the step.
        drop_last: drop a tail shorter than `batch_size`.
        least: fewest samples of a rank's share, 1 or 2. With 2 one worker alone leaves itself as many for the last
            step, and a leftover that would leave some rank one is taken along, at most two samples more per rank.

    Returns 0, or a size in world_size..batch_size + least * world_size - 1, or what is left where that is less than
    `world_size`.

    Raises ValueError: bad input.

    >>> [step_size(position=p, total=21, batch_size=8, world_size=4) for p in (0, 8, 16, 21)]
    [8, 8, 5, 0]
    >>> [step_size(position=p, total=18, batch_size=8, world_size=4) for p in (0, 8, 14)]
    [8, 6, 4]
    >>> [step_size(position=p, total=28, batch_size=24, world_size=4) for p in (0, 20)]
    [20, 8]
    >>> [step_size(position=p, total=3, batch_size=8, world_size=4) for p in (0, 3)]
    [3, 0]
    """
    remaining = _remaining(position=position, total=total, world_size=world_size)
    _check_count("batch_size", batch_size, at_least=1)
    if batch_size < world_size:
        raise ValueError(
            f"batch_size must be at least the world size {world_size}, one sample a worker, but got "
            f"{batch_size}; use a larger batch or fewer workers"
        )
    if remaining == 0 or (drop_last and remaining < batch_size):
        return 0
    if drop_last and remaining > batch_size:
        return batch_size
    return _size_before_leftover(remaining, batch_size, world_size, least)


def _size_before_leftover(remaining: int, batch_size: int, world_size: int, least: int) -> int:
    """Return the size of a step after which the last one still has samples for all ranks; see :func:`step_size`."""
    if remaining <= batch_size:
        return remaining
    leftover = remaining - batch_size
    if world_size == 1 and leftover < least <= remaining - least:
        return remaining - least
    if leftover >= 2 * world_size:
        return batch_size
    if world_size > 1 and remaining >= 4 * world_size:
        return remaining - 2 * world_size
    if least > 1 and world_size > 1:
        return remaining  # two steps would leave somebody one sample
    if leftover >= world_size:
        return batch_size
    shortened = remaining - world_size
    return shortened if shortened >= world_size else remaining


def can_switch(*, position: int, total: int, world_size: int) -> bool:
    """True if a generation of `world_size` workers may start here; if not, a planned change waits.

    True if the samples that are left give each worker at least two (BatchNorm cannot do with one); at the beginning
    and the end of an epoch, if the next one, taken to be as long as this one, gives each at least one.
    """
    remaining = _remaining(position=position, total=total, world_size=world_size)
    return total >= world_size if remaining in (0, total) else remaining >= 2 * world_size


def micro_steps_for(count: int, *, world_size: int, micro_steps: int, least: int = 1) -> int:
    """Return the number of micro-steps for `count` samples: `micro_steps`, or fewer if some would be below `least`.

    Returns min(micro_steps, floor(count / world_size / least)), and at least 1; the same on every rank.

    Raises ValueError: bad input.
    """
    _check_count("world_size", world_size, at_least=1)
    _check_count("micro_steps", micro_steps, at_least=1)
    _check_count("count", count, at_least=1)
    return max(1, min(micro_steps, count // (world_size * least)))


def split(
    count: int, *, world_size: int, micro_steps: int = 1, shares: Shares | None = None, least: int = 1
) -> Indices:
    """Return sizes of the pieces into which a step of `count` samples is cut.

    Returns array of shape [world_size, micro_steps_for(count, ...)]; every entry is at least 1, and the whole sums to
    `count`. Any two entries of a rank differ by at most 1. Without `shares` so do any two entries and any two ranks'
    sums, and earlier ranks take the larger shares; with them see `shares.by_weight`. Where `count` is less than
    `world_size` the first ranks take 1 each, and the others 0, whatever the shares. No entry is below `least` where
    `count` has as many for each rank.

    Raises ValueError: bad input, or shares of another number of ranks.

    >>> split(11, world_size=2, micro_steps=2).tolist()
    [[3, 3], [3, 2]]
    >>> split(3, world_size=4).tolist()
    [[1], [1], [1], [0]]
    >>> split(9, world_size=2, micro_steps=4, least=2).tolist()
    [[3, 2], [2, 2]]
    """
    steps = micro_steps_for(count, world_size=world_size, micro_steps=micro_steps, least=least)
    if shares is not None and len(shares.weights) != world_size:
        raise ValueError(f"shares must have a weight for each of {world_size} ranks, but got {shares.weights}")
    if shares is None or count < world_size:
        counts = _even(np.array([count], dtype=np.int64), world_size)[0]
    else:
        counts = np.array(by_weight(count, shares, steps), dtype=np.int64)
    return _even(counts, steps)


def rank_slices(
    count: int, *, rank: int, world_size: int, micro_steps: int = 1, shares: Shares | None = None, least: int = 1
) -> list[slice]:
    """Return the slices of 0..count that `rank` takes in each micro-step of a step of `count` samples.

    A rank's slices are contiguous, so that an order which follows a file gives each rank one stretch of it.

    Raises ValueError: bad input, or rank outside 0..world_size-1.
    """
    sizes = split(count, world_size=world_size, micro_steps=micro_steps, shares=shares, least=least)
    _check_count("rank", rank, at_least=0)
    if rank >= world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1} for world size {world_size}, but got {rank}")
    start = int(sizes[:rank].sum())
    edges = [start, *(start + int(edge) for edge in np.cumsum(sizes[rank]))]
    return [slice(first, last) for first, last in itertools.pairwise(edges) if first < last]


def _even(counts: Indices, parts: int) -> Indices:
    """Return each count [n] cut into `parts` sizes that differ by at most 1, larger ones first: [n, parts]."""
    base, extra = np.divmod(counts[:, None], parts)
    return np.asarray(base + (np.arange(parts)[None, :] < extra), dtype=np.int64)


def _remaining(*, position: int, total: int, world_size: int) -> int:
    _check_count("total", total, at_least=0)
    _check_count("position", position, at_least=0)
    _check_count("world_size", world_size, at_least=1)
    if position > total:
        raise ValueError(f"position must be in 0..{total}, the samples of the epoch, but got {position}")
    return total - position


def _check_count(name: str, value: Any, *, at_least: int) -> None:
    # bool is an int to Python, and a True that slips in as a size hides a mix-up of arguments
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, but got {value!r} of type {type(value).__name__}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, but got {value}")


def batch_ends(samples: int, batch_size: int, *, drop_last: bool) -> list[int]:
    """Return the ends of the batches in an order of ``samples``; the last batch may be shorter, or is dropped.

    >>> batch_ends(7, 3, drop_last=False), batch_ends(7, 3, drop_last=True)
    ([3, 6, 7], [3, 6])
    """
    ends = list(range(batch_size, samples + 1, batch_size))
    return ends if drop_last or samples % batch_size == 0 else [*ends, samples]


def whole_step(ends: Sequence[int], *, position: int, world_size: int) -> list[tuple[int, int]]:
    """Return the sample range (first, last + 1) of each rank's batch in the step at ``position``.

    It is shorter than ``world_size`` for ranks without one, empty at the end of the pass.

    Raises ValueError: ``position`` is not where a batch begins.

    >>> whole_step([3, 6, 7], position=3, world_size=4)
    [(3, 6), (6, 7)]
    """
    first = bisect.bisect_right(ends, position)
    begin = ends[first - 1] if first else 0
    if begin != position:
        raise ValueError(
            f"position must be where a batch begins, but got {position}, within the batch from {begin} on: "
            "the batches of this pass are not those with which it began"
        )
    step = ends[first : first + world_size]
    return list(zip([position, *step], step, strict=False))


def batches_of(count: int, *, rank: int, world_size: int) -> int:
    """Return the number of a pass's ``count`` batches that a rank takes, if the group keeps its size."""
    return len(range(rank, count, world_size))
