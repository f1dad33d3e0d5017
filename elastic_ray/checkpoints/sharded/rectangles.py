"""Consecutive elements of a tensor as rectangles, which is how torch's distributed checkpoints know parts (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """Elements of a tensor that are consecutive in it and a rectangle.

    Attributes:
        start: place of the first one in the flattened tensor.
        offsets: index of the first one, by dimension.
        sizes: of the rectangle, by dimension.
    """

    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def rectangles(shape: tuple[int, ...], start: int, length: int) -> Iterator[Rectangle]:
    """The fewest rectangles of consecutive elements that make up a run of elements, in their order.

    For d dimensions they are at most 2 d - 1: what is left of the first row, whole rows, and the beginning of the
    last one, and so on for each of the two that are not whole. A tensor without elements is one rectangle.

    Args:
        start: the first element of the flattened tensor.
        length: elements, 0 only for a tensor that has none.
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
