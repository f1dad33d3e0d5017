"""Division of a table into tiles, independent of the group that holds them (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

_MOST_TILES = 256
_WORD_BITS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class RowTiling:
    """Assignment of a table's rows to tiles: row ``i`` is in tile ``i % tiles``, at position ``i // tiles``.

    Neighbouring rows are in different tiles, which balances load, because the first rows are often the most used.
    """

    rows: int  # of the table; 1 or more
    tiles: int  # how many tiles there are, whatever the group; at most ``rows``

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
        """Number of positions in a tile; the last one is unused in tiles with one row less."""
        return -(-self.rows // self.tiles)

    def rows_in(self, tile: int) -> int:
        """Return the number of rows in one tile."""
        return -(-(self.rows - tile) // self.tiles)


def to_words(tiles: Iterable[int], count: int) -> list[int]:
    """Return a set of tiles out of ``count`` as integers below 2^32, one bit per tile.

    >>> to_words([0, 33], 40)
    [1, 2]
    """
    words = [0] * -(-count // _WORD_BITS)
    for tile in tiles:
        words[tile // _WORD_BITS] |= 1 << tile % _WORD_BITS
    return words


def from_words(words: Sequence[int], count: int) -> frozenset[int]:
    """Return the set of tiles encoded by :func:`to_words`."""
    return frozenset(tile for tile in range(count) if words[tile // _WORD_BITS] >> tile % _WORD_BITS & 1)
