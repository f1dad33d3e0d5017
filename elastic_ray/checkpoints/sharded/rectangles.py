"""Consecutive tensor elements as rectangles, the form that torch's distributed checkpoints require (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """Consecutive elements of a tensor that form a rectangle."""

    start: int  # place of the first one in the flattened tensor
    offsets: tuple[int, ...]  # index of the first one, by dimension
    sizes: tuple[int, ...]  # of the rectangle, by dimension

    @property
    def length(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def rectangles(shape: tuple[int, ...], start: int, length: int) -> Iterator[Rectangle]:
    """Yield the smallest set of rectangles, in order, that make up a run of consecutive elements.

    For d dimensions there are at most 2 d - 1: the rest of the first row, complete rows, and the start of the last row;
    each of the two partial rows is divided in the same way. A tensor without elements is one rectangle.
    """
    if not shape:
        yield Rectangle(0, (), ())
        return
    row = math.prod(shape[1:])
    if not row or not length:
        yield Rectangle(0, (0,) * len(shape), shape)
        return
    at, end = start, start + length
    while at < end:
        first, inside = divmod(at, row)
        if inside or end - at < row:
            count = min(end - at, row - inside)
            for part in rectangles(shape[1:], inside, count):
                yield Rectangle(first * row + part.start, (first, *part.offsets), (1, *part.sizes))
        else:
            rows = (end - at) // row
            count = rows * row
            yield Rectangle(at, (first, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        at += count
