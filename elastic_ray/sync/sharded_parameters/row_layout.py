"""Layout of parameter rows on ranks, and the moves between layouts when the group changes (pure).

Torch divides each parameter along its first dimension as ``torch.chunk`` does: among ``W`` ranks, rank ``r`` owns rows
``[r * c, (r + 1) * c)`` with ``c = ceil(rows / W)``, limited by the number of rows. Two numbers thus identify a shard:
the number of parts, and its index among them. At least two ranks hold each shard. With several shard groups, these are
its owners, one in each group. In a single group of all ranks, they are its owner and a follower: the next rank or, for
the first step after a group change, a rank that already has the rows.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set

COPIES = 2
"""Ranks that hold each shard, in a group of so many or more."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class ShardId:
    """Identifier of a shard of the model: the number of parts, and the shard's index among them."""

    world: int  # ranks that it was cut for, those of a shard group; 1 or more
    index: int  # its place, from 0 to ``world - 1``

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.world:
            raise ValueError(
                f"index must be from 0 to {self.world - 1} in a group of {self.world}, but got {self.index}"
            )


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Consecutive rows of one parameter.

    Attributes:
        param: Position of the parameter in the model.
        start, stop: Half-open range of rows; ``start < stop``.
    """

    param: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.param}:{self.start}:{self.stop}"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class RowMove:
    """Transfer of rows from one rank to another."""

    source: int
    destination: int
    piece: Piece


def rows_of(rows: int, shard: ShardId) -> tuple[int, int]:
    """Return the half-open row range of `shard` in a parameter with `rows` rows; empty if start == stop."""
    each = -(-rows // shard.world)
    return min(rows, shard.index * each), min(rows, (shard.index + 1) * each)


def pieces_of(rows: Sequence[int], shard: ShardId) -> tuple[Piece, ...]:
    """Return the pieces of a shard, one for each parameter with rows in the shard."""
    ranges = [(param, *rows_of(count, shard)) for param, count in enumerate(rows)]
    return tuple(Piece(param, start, stop) for param, start, stop in ranges if start < stop)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Assignment of shards to ranks: shard groups that divide the rows, and followers that hold copies.

    Attributes:
        groups: Ranks of each shard group in ascending order, which is the order of their shards. Either one group of
            all ranks, whose shards also have followers, or several groups of equal size, each holding all rows.
        followers: In a single group, the follower of each shard; by default, the rank after the shard's owner.
    """

    groups: tuple[tuple[int, ...], ...]
    followers: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        """Number of ranks in the layout."""
        return len(self.groups) * self.parts

    @property
    def parts(self) -> int:
        """Number of shards that the rows are divided into."""
        return len(self.groups[0])

    @property
    def is_replicated(self) -> bool:
        """True if each shard has owners in several groups and therefore no follower."""
        return len(self.groups) > 1

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks in the shard group that a rank belongs to."""
        return next(group for group in self.groups if rank in group)

    def owned_by(self, rank: int) -> ShardId:
        """Return the shard owned by a rank."""
        return ShardId(self.parts, self.group_of(rank).index(rank))

    def held_by(self, rank: int) -> tuple[ShardId, ...]:
        """Return the shards held by a rank: first the shard it owns, then the shards it follows."""
        own = self.owned_by(rank)
        before = [(own.index - i) % self.parts for i in range(1, self.parts)]
        return own, *(ShardId(self.parts, index) for index in before if self.follower_of(index) == rank)

    def follower_of(self, index: int) -> int | None:
        """Return the follower of shard `index`: the rank that holds a copy without owning it; None if it has none.

        Shards with several owners, and shards in a group of one rank, have no follower.
        """
        if self.is_replicated or self.parts == 1:
            return None
        return self.followers[index] if self.followers else (index + 1) % self.parts

    def owners(self, index: int) -> tuple[int, ...]:
        """Return the ranks that own shard `index`, one in each group, in ascending order."""
        return tuple(sorted(group[index] for group in self.groups))

    def holders(self, index: int) -> tuple[int, ...]:
        """Return the ranks that hold shard `index`: its owners in ascending order, then its follower."""
        follower = self.follower_of(index)
        return self.owners(index) if follower is None else (*self.owners(index), follower)


def layout_of(world: int, shard_size: int | None = None, nodes: Sequence[str] = ()) -> Layout:
    """Return the layout of rows for a group of `world` ranks.

    Args:
        shard_size: Number of ranks in a shard group; None for one group of all ranks. A single group is also used if
            `world` is not a multiple of this number, or too small for two groups.
        nodes: Node of each rank; by default, all ranks are on one node. Groups are formed within a node as long as it
            has enough ranks left. The remaining ranks are grouped in the order of their nodes.
    """
    if shard_size is None or world < 2 * shard_size or world % shard_size:
        return Layout((tuple(range(world)),))
    nodes = nodes or [""] * world
    whole, left = list[int](), list[int]()
    for node in dict.fromkeys(nodes):
        here = [rank for rank in range(world) if nodes[rank] == node]
        fit = len(here) - len(here) % shard_size
        whole += here[:fit]
        left += here[fit:]
    ranks = whole + left
    groups = [tuple(sorted(ranks[at : at + shard_size])) for at in range(0, world, shard_size)]
    return Layout(tuple(sorted(groups)))


def meanwhile(rows: Sequence[int], held: Sequence[Set[ShardId]], target: Layout) -> Layout:
    """Return an interim layout: the target layout, but with followers that already have their rows.

    A follower holds the second copy of a shard. A new group can thus train before second copies are sent.

    Each follower that lacks rows is replaced by a rank that has all of the shard's rows, if possible. If several ranks
    qualify, the rank that follows the fewest shards is chosen.
    """
    if target.follower_of(0) is None:
        return target
    have = [covered(rows, mine) for mine in held]
    pieces = [pieces_of(rows, ShardId(target.parts, index)) for index in range(target.parts)]

    def has(rank: int, index: int) -> bool:
        return not any(_without((each.start, each.stop), have[rank][each.param]) for each in pieces[index])

    wanted = tuple(target.holders(index)[1] for index in range(target.parts))
    found = {index: rank for index, rank in enumerate(wanted) if has(rank, index)}
    load = collections.Counter(found.values())
    for index in range(target.parts):
        if index in found:
            continue
        others = [rank for rank in range(target.world) if rank != target.owners(index)[0] and has(rank, index)]
        rank = min(others, key=lambda each: (load[each], each)) if others else wanted[index]
        found[index] = rank
        load[rank] += 1
    followers = tuple(found[index] for index in range(target.parts))
    return target if followers == wanted else dataclasses.replace(target, followers=followers)


def check_shard_sizes(sizes: Sequence[int]) -> None:
    """Raise ValueError if ranks have sharded the model with different ``shard_size`` values (0 means None)."""
    other = next((rank for rank, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        raise ValueError(
            f"shard_size must be the same on all workers, but is {sizes[0] or None} on rank 0 and "
            f"{sizes[other] or None} on rank {other}"
        )


def covered(rows: Sequence[int], shards: Iterable[ShardId]) -> list[list[tuple[int, int]]]:
    """Return, for each parameter, the row ranges that the shards contain between them, ordered and disjoint."""
    found: list[list[tuple[int, int]]] = []
    shards = sorted(shards)
    for count in rows:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(rows_of(count, shard) for shard in shards):
            if start == stop:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((start, stop))
        found.append(merged)
    return found


def lost(rows: Sequence[int], held: Sequence[Set[ShardId]]) -> tuple[Piece, ...]:
    """Return the rows not held by any rank, as pieces of parameters.

    Args:
        held: Shards held by each rank, possibly from several layouts.
    """
    have = covered(rows, {shard for mine in held for shard in mine})
    return tuple(
        Piece(param, start, stop)
        for param, count in enumerate(rows)
        for start, stop in _without((0, count), have[param])
    )


def moves(
    rows: Sequence[int], held: Sequence[Set[ShardId]], layout: Layout, widths: Sequence[int] | None = None
) -> tuple[RowMove, ...]:
    """Return the moves for the rows that ranks lack to hold their shards in the layout.

    If several ranks hold a row, it is sent by the rank with the least to send so far.

    Args:
        widths: Number of elements per row of each parameter; 1 by default.

    Raises ValueError if any rows are not held by any rank; see :func:`lost`.
    """
    world = len(held)
    widths = widths or [1] * len(rows)
    have = [covered(rows, mine) for mine in held]
    sent = [0] * world
    found: list[RowMove] = []
    for destination in range(world):
        for param, count in enumerate(rows):
            wanted = covered([count], layout.held_by(destination))[0]
            for each in wanted:
                for missing in _without(each, have[destination][param]):
                    found += _from_holders(
                        param, missing, [ranges[param] for ranges in have], destination, sent, widths
                    )
    return tuple(found)


def to_code(shard: ShardId) -> int:
    """Return a shard's identifier as a positive integer, for :func:`from_code`."""
    return shard.world << 20 | shard.index


def from_code(code: int) -> ShardId:
    """Return the shard identifier encoded by :func:`to_code`; raises ValueError for an invalid code."""
    return ShardId(code >> 20, code & ((1 << 20) - 1))


def _without(each: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of a range that lie outside the given ordered ranges."""
    first, last = each
    found = []
    for start, stop in ranges:
        if stop <= first or start >= last:
            continue
        if start > first:
            found.append((first, start))
        first = max(first, stop)
    if first < last:
        found.append((first, last))
    return found


def _from_holders(
    param: int,
    missing: tuple[int, int],
    have: Sequence[Sequence[tuple[int, int]]],
    destination: int,
    sent: list[int],
    widths: Sequence[int],
) -> list[RowMove]:
    """Return moves for missing rows, in as few pieces as their holders' ranges allow."""
    first, last = missing
    edges = {edge for ranges in have for each in ranges for edge in each if first < edge < last}
    found: list[RowMove] = []
    for start, stop in zip([first, *sorted(edges)], [*sorted(edges), last], strict=True):
        holders = [r for r, ranges in enumerate(have) if any(a <= start and stop <= b for a, b in ranges)]
        source = min(holders, key=lambda rank: (sent[rank], rank))
        sent[source] += (stop - start) * widths[param]
        found.append(RowMove(source, destination, Piece(param, start, stop)))
    return found


def by_pair(moved: Sequence[RowMove]) -> Mapping[tuple[int, int], tuple[Piece, ...]]:
    """Return the pieces sent by ranks, in sending order, keyed by (source rank, destination rank)."""
    found: dict[tuple[int, int], list[Piece]] = {}
    for move in moved:
        found.setdefault((move.source, move.destination), []).append(move.piece)
    return {pair: tuple(sorted(pieces)) for pair, pieces in found.items()}
