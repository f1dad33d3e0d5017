"""Division of an epoch's samples between ranks: pure arithmetic, the same on every rank.

An epoch is an *order* of ``total`` indices, fixed by the seed and the epoch alone. Progress within it is one number,
``position``: the number of samples in that order that committed steps have used. World size, batch size and
accumulation determine only how the *next* global batch ``order[position : position + step_size(...)]`` is divided,
never which samples are left. Every sample is therefore used exactly once per epoch, no matter how the job grows,
shrinks or fails. A failed step is drawn again by calling the same functions with the same position.

If evaluation does not divide batches, the batches are consecutive in that order, and batch ``b`` ends at sample
``ends[b]``. A step uses the next ``world_size`` batches, one per rank, so the position is always the end of a batch,
and a group of any size can continue from it. Only the last step may have fewer batches than ranks; the last ranks then
get none.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

_ROUNDS = 64  # of bisection: more than a double has bits
_LEAST = 2  # samples of a micro-batch: BatchNorm cannot do with one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Weights of ranks for unequal shares of a step, with the fewest and most samples per micro-batch."""

    # of the ranks, each above 0; a rank of weight 0.5 takes half as many samples as one of weight 1
    weights: tuple[float, ...]
    least: int = 1  # fewest samples of a micro-batch, where an equal split has so many
    most: int | None = None  # most samples of a micro-batch, where an equal split has no more; None for no bound


def by_weight(count: int, shares: Shares, micro_steps: int) -> list[int]:
    """Return each rank's number of samples in a step, minimising the largest ratio of samples to weight.

    If the weights are proportional to the ranks' speeds, this division gives the shortest step (Jefferson's method of
    apportionment within bounds). Equal weights give the equal split, larger shares first.

    Args:
        count: samples in the step, at least ranks x micro_steps.
        micro_steps: micro-batches per rank; each gets at least one sample.

    Returns one size of at least ``micro_steps`` for each rank; the sizes sum to ``count``.
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
    """Give one more sample to the rank that would finish it first."""
    open_ranks = [rank for rank, size in enumerate(sizes) if size < high]
    sizes[min(open_ranks, key=lambda rank: (sizes[rank] + 1) / weights[rank])] += 1


Indices = npt.NDArray[np.int64]

_ROUNDS, _SMALL, _SMALL_ROUNDS = 8, 1024, 24  # few cells mix slowly
_HALF = np.uint64(32)
_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)  # of well-known 64-bit mixers


class Order(Protocol):
    """Protocol for sample indices in the order of use: an array, or an object that computes any requested part."""

    def __len__(self) -> int:
        """Return the number of indices."""
        ...

    def __getitem__(self, part: slice | Indices, /) -> Indices:
        """Return the sample indices at the given positions of the order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """Indices 0..samples-1 in a pseudo-random order that depends on ``key`` alone; computed on demand.

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
        """Return the indices at the positions ``part`` (0..samples-1) of the permutation; a scalar for one position."""
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
    """Return the positions that ``part`` selects in a sequence of ``samples`` elements."""
    return np.arange(*part.indices(samples), dtype=np.int64) if isinstance(part, slice) else part


def _added(one: npt.NDArray[np.uint64], size: int, other: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the sum modulo ``size`` of numbers below ``size``."""
    total = one + other
    return total - np.uint64(size) * (total >= np.uint64(size))


def _hashed(values: npt.NDArray[np.uint64], key: np.uint64, size: int) -> npt.NDArray[np.uint64]:
    """Return a number below ``size`` for each value, by a multiplicative hash (products are taken modulo 2**64)."""
    mixed = (values + key) * _FACTORS[0]
    mixed ^= mixed >> _HALF
    mixed *= _FACTORS[1]
    return ((mixed >> _HALF) * np.uint64(size)) >> _HALF


def epoch_key(*, seed: int, epoch: int) -> str:
    """Return the key for an epoch's random numbers; equal for equal ``seed`` and ``epoch``."""
    return f"{seed} {epoch}"


def step_size(
    *, position: int, total: int, batch_size: int, world_size: int, drop_last: bool = False, least: int = 1
) -> int:
    """Return the size of the next global batch, giving every rank a sample in every step if possible.

    This is usually `batch_size`, and 0 once the epoch has ended. If a full batch would leave a leftover l with 1 <= l <
    2 world_size, this step uses ``batch_size - (2 world_size - l)`` samples, so that each of several ranks has two
    samples in the last step (BatchNorm fails with one). If that would leave fewer than 2 world_size samples in this
    step, one sample per rank must suffice. In that case, with l < world_size (too few for all ranks), this step uses
    ``batch_size - (world_size - l)``, or, if that is below `world_size`, includes the leftover: ``batch_size + l``, at
    most one more sample per rank. With `drop_last`, a tail shorter than `batch_size` is dropped (0), and step sizes are
    never adapted. If fewer samples are left than there are ranks, as in an evaluation over few samples, the step uses
    all of them: the first ranks have one sample each, the others none (see :func:`split`). If a job checks `can_switch`
    before each planned change, this only happens in a pass over fewer samples than ranks, because a failure can only
    shrink the group.

    Args:
        least: fewest samples in a rank's share, 1 or 2. With 2, a lone worker leaves that many for the last step, and a
            leftover that would give some rank only one sample is included in this step, at most two more samples per
            rank.

    Returns 0, or a size in world_size..batch_size + least * world_size - 1, or the remaining samples if there are fewer
    than `world_size`.

    Raises ValueError if `position` is beyond the epoch, whose data are then not those that it began with.

    >>> [step_size(position=p, total=21, batch_size=8, world_size=4) for p in (0, 8, 16, 21)]
    [8, 8, 5, 0]
    >>> [step_size(position=p, total=18, batch_size=8, world_size=4) for p in (0, 8, 14)]
    [8, 6, 4]
    >>> [step_size(position=p, total=28, batch_size=24, world_size=4) for p in (0, 20)]
    [20, 8]
    >>> [step_size(position=p, total=3, batch_size=8, world_size=4) for p in (0, 3)]
    [3, 0]
    """
    remaining = _remaining(position, total)
    if remaining == 0 or (drop_last and remaining < batch_size):
        return 0
    if drop_last and remaining > batch_size:
        return batch_size
    return _size_before_leftover(remaining, batch_size, world_size, least)


def _size_before_leftover(remaining: int, batch_size: int, world_size: int, least: int) -> int:
    """Return a step size that leaves enough samples for all ranks in the last step; see :func:`step_size`."""
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
    """True if a generation of `world_size` workers may start at `position`; if not, a planned change waits.

    Within an epoch, the remaining samples must give each worker at least two (BatchNorm fails with one). At an epoch's
    start and end, an epoch of `total` samples must give each worker at least one.
    """
    remaining = _remaining(position, total)
    return total >= world_size if remaining in (0, total) else remaining >= 2 * world_size


def micro_steps_for(count: int, *, world_size: int, micro_steps: int, least: int = 1) -> int:
    """Return the number of micro-steps for `count` samples: `micro_steps`, or fewer if they would be too small.

    Returns min(micro_steps, floor(count / world_size / least)), and at least 1; the same on every rank. `least` is the
    minimum number of samples per rank and micro-step.
    """
    return max(1, min(micro_steps, count // (world_size * least)))


def split(
    count: int, *, world_size: int, micro_steps: int = 1, shares: Shares | None = None, least: int = 1
) -> Indices:
    """Return the number of samples for each rank and micro-step in a step with `count` samples.

    Returns an array of shape [world_size, micro_steps_for(count, ...)] that sums to `count`; every entry is at least 1.
    The entries of one rank differ by at most 1. Without `shares`, any two entries and any two ranks' sums also differ
    by at most 1, and earlier ranks get the larger shares; with `shares`, see `shares.by_weight`. If `count` is less
    than `world_size`, the first ranks get 1 each and the others 0, regardless of the shares. No entry is below `least`
    if `count` provides that many for each rank.

    >>> split(11, world_size=2, micro_steps=2).tolist()
    [[3, 3], [3, 2]]
    >>> split(3, world_size=4).tolist()
    [[1], [1], [1], [0]]
    >>> split(9, world_size=2, micro_steps=4, least=2).tolist()
    [[3, 2], [2, 2]]
    """
    steps = micro_steps_for(count, world_size=world_size, micro_steps=micro_steps, least=least)
    if shares is None or count < world_size:
        counts = _even(np.array([count], dtype=np.int64), world_size)[0]
    else:
        counts = np.array(by_weight(count, shares, steps), dtype=np.int64)
    return _even(counts, steps)


def rank_slices(
    count: int, *, rank: int, world_size: int, micro_steps: int = 1, shares: Shares | None = None, least: int = 1
) -> list[slice]:
    """Return the slices of 0..count that `rank` uses in each micro-step of a step with `count` samples.

    A rank's slices are contiguous, so if the order is the order of a file, each rank gets one contiguous part of the
    file.
    """
    sizes = split(count, world_size=world_size, micro_steps=micro_steps, shares=shares, least=least)
    start = int(sizes[:rank].sum())
    edges = [start, *(start + int(edge) for edge in np.cumsum(sizes[rank]))]
    return [slice(first, last) for first, last in itertools.pairwise(edges) if first < last]


def _even(counts: Indices, parts: int) -> Indices:
    """Return each count [n] divided into `parts` sizes that differ by at most 1, larger ones first: [n, parts]."""
    base, extra = np.divmod(counts[:, None], parts)
    return np.asarray(base + (np.arange(parts)[None, :] < extra), dtype=np.int64)


def _remaining(position: int, total: int) -> int:
    if position > total:
        raise ValueError(f"position must be in 0..{total}, the samples of the epoch, but got {position}")
    return total - position


def batch_ends(samples: int, batch_size: int, *, drop_last: bool) -> list[int]:
    """Return the positions where undivided batches end; with ``drop_last``, a shorter last batch is left out.

    >>> batch_ends(7, 3, drop_last=False), batch_ends(7, 3, drop_last=True)
    ([3, 6, 7], [3, 6])
    """
    ends = list(range(batch_size, samples + 1, batch_size))
    return ends if drop_last or samples % batch_size == 0 else [*ends, samples]


def whole_step(ends: Sequence[int], *, position: int, world_size: int) -> list[tuple[int, int]]:
    """Return the sample range (first, last + 1) of each rank's undivided batch in the step at ``position``.

    ``ends`` holds each batch's end position. The result is shorter than ``world_size`` if some ranks get no batch, and
    empty once the pass has ended.

    Raises ValueError if ``position`` is not the start of a batch.

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
    """Return how many of a pass's ``count`` undivided batches `rank` gets if the group's size does not change."""
    return len(range(rank, count, world_size))
