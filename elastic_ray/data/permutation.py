"""Random access to a shuffled epoch's permutation with pure integer arithmetic.

A permutation of 0..n-1 that keeps nothing but its keys: a Feistel network over the grid of a x b cells, the squarest
one that holds n. A cell is (left, right); each round adds a keyed hash of one coordinate to the other, modulo that
one's range, so a round can be undone and the whole is a bijection of the grid. An index that comes out at n or beyond
goes through again until it comes out below ("cycle walking"). That is rare: the grid has fewer than a cells too many.

The result is fixed for ever: integers of 64 bits alone, the same on every platform and with every version of NumPy.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_ROUNDS, _SMALL, _SMALL_ROUNDS = 8, 1024, 24  # few cells mix slowly
_HALF = np.uint64(32)
_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)  # of well-known 64-bit mixers


class Order(Protocol):
    """Indices in the order of use, of which any part can be had: an array, or one that computes the part."""

    def __len__(self) -> int:
        """Return the number of indices."""
        ...

    def __getitem__(self, part: slice | Indices, /) -> Indices:
        """Return the indices at some positions."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """Indices 0..samples-1 in an order that depends on ``key`` alone; computed as they are asked for.

    Attributes:
        key: any text; equal texts give equal orders. Empty: they ascend.

    >>> Permutation(samples=10**12, key="0 0")[7:10].tolist()
    [488436971634, 693908669537, 664861892677]
    """

    samples: int
    key: str = ""
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
