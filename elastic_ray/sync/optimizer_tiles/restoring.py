"""Which tiles move in a pause, and which in the steps behind it (pure).

A new group trains as soon as each tile has one owner and each joiner the tiles that it is to update first. Other owners
receive theirs step by step, from ranks that hold them meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from elastic_ray.sync.sharded.placement import Move

Owners = tuple[tuple[int, ...], ...]
"""Ranks by tile; the first one sends parameters, and sums of gradients, to others."""


def needed_at_once(moves: Sequence[Move], target: Owners, held: Sequence[Set[int]]) -> tuple[Move, ...]:
    """Of moves that lead to a target, what the next step needs: what ranks are to update first that hold nothing."""
    return tuple(move for move in moves if not held[move.destination] and target[move.tile][0] == move.destination)


def moved(moves: Sequence[Move], held: Sequence[Set[int]]) -> list[frozenset[int]]:
    """What each rank holds once moves are made."""
    return [
        frozenset(tiles) | {move.tile for move in moves if move.destination == rank} for rank, tiles in enumerate(held)
    ]


def owners_meanwhile(target: Owners, held: Sequence[Set[int]]) -> Owners:
    """Owners for the time being: those of the target that hold their tile, and others that do in place of the rest.

    Args:
        target: owners by tile.
        held: tiles by rank; each lies with one of them at least.
    """
    found = []
    for tile, wanted in enumerate(target):
        ready = [rank for rank in wanted if tile in held[rank]]
        others = [rank for rank, tiles in enumerate(held) if tile in tiles and rank not in wanted]
        found.append(tuple([*ready, *others][: len(wanted)]))
    return tuple(found)


def next_moves(target: Owners, present: Owners, sizes: Sequence[int], most: int) -> tuple[Move, ...]:
    """What moves behind the next step: each rank receives one tile, or more as long as they are small.

    Args:
        target: owners by tile.
        present: the same, at present.
        sizes: of each tile.
        most: that a rank receives of more than one tile, in the unit of the sizes.
    """
    ranks = range(1 + max(rank for mine in (*target, *present) for rank in mine))
    received, sent = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    found = []
    for tile in sorted(range(len(target)), key=lambda tile: (len(present[tile]), tile)):  # the only copies first
        for rank in target[tile]:
            if rank in present[tile] or (received[rank] and received[rank] + sizes[tile] > most):
                continue
            source = min(present[tile], key=lambda holder: (sent[holder], holder))
            received[rank] += sizes[tile]
            sent[source] += sizes[tile]
            found.append(Move(tile, source, rank))
    return tuple(found)
