"""Division of a table into tiles, independent of the group that holds them (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

_MOST_TILES = 256
_WORD_BITS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class RowTiling:
    """Rows of a table by tile: row ``i`` lies in tile ``i % tiles``, at place ``i // tiles``.

    Neighbouring rows, of which the first are often the most wanted, lie in different tiles.

    Attributes:
        rows: of the table; 1 or more.
        tiles: how many tiles there are, whatever the group; at most ``rows``.
    """

    rows: int
    tiles: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows must be 1 or more, but got {self.rows}")
        if not 1 <= self.tiles <= self.rows:
            raise ValueError(f"tiles must be between 1 and rows={self.rows}, but got {self.tiles}")

    @classmethod
    def of(cls, rows: int) -> RowTiling:
        """Return the tiling of a table with `rows` rows; enough tiles to balance a large group within 1 or 2 percent.

        >>> RowTiling.of(1000)
        RowTiling(rows=1000, tiles=256)
        """
        return cls(rows, max(1, min(rows, _MOST_TILES)))

    @property
    def height(self) -> int:
        """Places of a tile; the last one is free in tiles that have a row less."""
        return -(-self.rows // self.tiles)

    def rows_in(self, tile: int) -> int:
        """Rows of one tile."""
        return -(-(self.rows - tile) // self.tiles)


def to_words(tiles: Iterable[int], count: int) -> list[int]:
    """A set of tiles out of ``count`` as integers below 2^32, a bit a tile.

    >>> to_words([0, 33], 40)
    [1, 2]
    """
    words = [0] * -(-count // _WORD_BITS)
    for tile in tiles:
        words[tile // _WORD_BITS] |= 1 << tile % _WORD_BITS
    return words


def from_words(words: Sequence[int], count: int) -> frozenset[int]:
    """The inverse of :func:`to_words`."""
    return frozenset(tile for tile in range(count) if words[tile // _WORD_BITS] >> tile % _WORD_BITS & 1)
