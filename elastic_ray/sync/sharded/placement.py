"""Division of a table into tiles, their owners, and their moves when the group changes (pure)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence, Set

_MOST_TILES = 256
_WORD_BITS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class RowTiling:
    """Assignment of a table's rows to tiles: row ``i`` is in tile ``i % tiles``, at position ``i // tiles``.

    Neighbouring rows are in different tiles. This balances the load, because the first rows are often used most.
    """

    rows: int  # of the table; 1 or more
    tiles: int  # how many tiles there are, whatever the group; at most ``rows``

    @classmethod
    def of(cls, rows: int) -> RowTiling:
        """Return a tiling of `rows` rows with enough tiles to balance a large group to within 1 or 2 percent.

        >>> RowTiling.of(1000)
        RowTiling(rows=1000, tiles=256)
        """
        return cls(rows, max(1, min(rows, _MOST_TILES)))

    @property
    def height(self) -> int:
        """Number of rows in the largest tile. A tile that is one row shorter leaves its last position unused."""
        return -(-self.rows // self.tiles)

    def rows_in(self, tile: int) -> int:
        """Return the number of table rows in the tile with this number."""
        return -(-(self.rows - tile) // self.tiles)


def to_words(tiles: Iterable[int], count: int) -> list[int]:
    """Encode a set of tile numbers below ``count`` as integers below 2^32, with one bit per tile.

    >>> to_words([0, 33], 40)
    [1, 2]
    """
    words = [0] * -(-count // _WORD_BITS)
    for tile in tiles:
        words[tile // _WORD_BITS] |= 1 << tile % _WORD_BITS
    return words


def from_words(words: Sequence[int], count: int) -> frozenset[int]:
    """Return the set of tile numbers below ``count`` that was encoded by :func:`to_words`."""
    return frozenset(tile for tile in range(count) if words[tile // _WORD_BITS] >> tile % _WORD_BITS & 1)


_Relation = Callable[[int, int], bool]  # of a tile and a rank


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """Transfer of one tile (part of a table or of optimizer state) from one rank to another."""

    tile: int
    source: int
    destination: int


def place(tiles: int, held: Sequence[Set[int]], nodes: Sequence[str], copies: int) -> tuple[tuple[int, ...], ...]:
    """Return each tile's owners, balanced over the ranks and preferably ranks that already hold the tile.

    Every tile has ``min(copies, ranks)`` owners, and the number of tiles per rank differs by at most one. If this
    balance permits, a tile's owners are on different nodes; if one node holds a tile twice, one copy moves to another
    node. As many copies as possible stay in place (a maximum matching); the other copies fill the remaining space. A
    held copy is moved only if no other copy can move.

    A tile's first owner supplies its contents to ranks that do not hold the tile; each rank is the first owner of
    roughly the same number of tiles.
    """
    world = len(held)
    copies = min(copies, world)
    matching = _Matching(tiles, held, _room(tiles * copies, [len(each) for each in held]), nodes)
    # Copies that are held stay where they are before others move to make room.
    phases = (
        (True, matching.holds, _any),
        *((apart, _any, gives_up) for apart in (True, False) for gives_up in (matching.lacks, _any)),
    )
    for apart, may, gives_up in phases:
        for _ in range(copies):
            for tile in range(tiles):
                if len(matching.owners[tile]) < copies:
                    matching.add(tile, may, gives_up, apart=apart and len(set(nodes)) > 1)
    return _first_in_turn(matching.owners, world)


def _room(total: int, sizes: Sequence[int]) -> list[int]:
    """Return the number of copies each rank should own: equal, plus one for the ranks that hold the most."""
    each, more = divmod(total, len(sizes))
    largest = sorted(range(len(sizes)), key=lambda rank: (-sizes[rank], rank))[:more]
    return [each + (rank in set(largest)) for rank in range(len(sizes))]


def _first_in_turn(owners: Sequence[Set[int]], world: int) -> tuple[tuple[int, ...], ...]:
    """Return each tile's owners, starting with the rank that is first for the fewest earlier tiles."""
    first = [0] * world
    found = []
    for mine in owners:
        ordered = sorted(mine, key=lambda rank: (first[rank], rank))
        first[ordered[0]] += 1
        found.append(tuple(ordered))
    return tuple(found)


def _any(tile: int, rank: int) -> bool:
    return True


class _Matching:
    """Partial matching of tiles to owners; no rank owns more tiles than it has room for."""

    def __init__(self, tiles: int, held: Sequence[Set[int]], room: Sequence[int], nodes: Sequence[str]) -> None:
        self._held, self._room, self._nodes = held, room, nodes
        self._owned: list[set[int]] = [set() for _ in room]
        self.owners: list[set[int]] = [set() for _ in range(tiles)]

    def holds(self, tile: int, rank: int) -> bool:
        """True if the rank held the tile before."""
        return tile in self._held[rank]

    def lacks(self, tile: int, rank: int) -> bool:
        """True if the rank did not hold the tile before."""
        return tile not in self._held[rank]

    def add(self, tile: int, may: _Relation, gives_up: _Relation, *, apart: bool) -> bool:
        """Find another owner for a tile; if room is short, reassign other tiles (shortest augmenting path).

        Args:
            may: Predicate for a tile and a rank: whether the rank may own the tile.
            gives_up: Predicate for an owned tile and a rank: whether the rank may stop owning the tile.
            apart: Whether the tile's owners must be on different nodes.

        Returns True if an owner was found.
        """
        gives: dict[int, tuple[int, int]] = {}  # by tile: the owner that it would give up, and for which tile
        queue = collections.deque([tile])
        seen = {tile}
        while queue:
            each = queue.popleft()
            stay = self.owners[each] - {gives[each][0]} if each in gives else self.owners[each]
            taken = {self._nodes[rank] for rank in stay} if apart else set()
            for rank, owned in enumerate(self._owned):
                if rank in self.owners[each] or self._nodes[rank] in taken or not may(each, rank):
                    continue
                if len(owned) < self._room[rank]:
                    self._give(each, rank, gives)
                    return True
                for other in sorted(owned - seen):
                    if not gives_up(other, rank):
                        continue
                    seen.add(other)
                    gives[other] = (rank, each)
                    queue.append(other)
        return False

    def _give(self, tile: int, rank: int, gives: dict[int, tuple[int, int]]) -> None:
        """Apply an augmenting path, starting from its end."""
        while True:
            self.owners[tile].add(rank)
            self._owned[rank].add(tile)
            if tile not in gives:
                return
            rank, after = gives[tile]
            self.owners[tile].remove(rank)
            self._owned[rank].remove(tile)
            tile = after


def moves(held: Sequence[Set[int]], owners: Sequence[Sequence[int]]) -> tuple[Move, ...]:
    """Return the moves that send each tile to any of its owners that lack it, balanced over the senders.

    Some rank must hold each tile; see :func:`lost`.
    """
    sent = [0] * len(held)
    found = []
    for tile, mine in enumerate(owners):
        holders = [rank for rank, each in enumerate(held) if tile in each]
        for rank in mine:
            if rank in holders:
                continue
            source = min(holders, key=lambda holder: (sent[holder], holder))
            sent[source] += 1
            found.append(Move(tile, source, rank))
    return tuple(found)


def hand_over(owners: Sequence[Sequence[int]], stays: Sequence[bool], copies: int = 1) -> tuple[Move, ...]:
    """Return the moves that leave each tile with ``copies`` owners among the staying ranks.

    If fewer than ``copies`` ranks stay, all of them own each tile. If possible, leaving ranks send the tiles, and the
    ranks with the fewest tiles receive them.
    """
    staying = [rank for rank, stay in enumerate(stays) if stay]
    load = collections.Counter(rank for mine in owners for rank in mine)
    found = []
    for tile, mine in enumerate(owners):
        source = min(mine, key=lambda rank: stays[rank])
        others = [rank for rank in staying if rank not in mine]
        for _ in range(min(copies, len(staying)) - (len(staying) - len(others))):
            destination = min(others, key=lambda rank: (load[rank], rank))
            others.remove(destination)
            load[destination] += 1
            found.append(Move(tile, source, destination))
    return tuple(found)


def lost(tiles: int, held: Sequence[Set[int]]) -> tuple[int, ...]:
    """Return the tiles not held by any rank, out of ``tiles`` tiles; ``held[r]`` are the tiles held by rank r."""
    return tuple(tile for tile in range(tiles) if not any(tile in each for each in held))
