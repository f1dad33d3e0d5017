"""Routes of a bucket's parts to their owners (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedSpan:
    """Consecutive elements of a parameter, and the ranks that own their optimizer state."""

    start: int  # first element, of the parameter as a vector
    length: int  # elements
    owners: tuple[int, ...]  # ranks; the first one adds up


@dataclasses.dataclass(frozen=True, slots=True)
class BucketPiece:
    """Consecutive elements of a bucket, and the ranks that own their optimizer state."""

    param: int  # position of the parameter in the bucket
    start: int  # first element, of the parameter as a vector
    at: int  # first element, of the bucket
    length: int  # elements
    owners: tuple[int, ...]  # as of ``OwnedSpan``


@dataclasses.dataclass(frozen=True, slots=True)
class Routes:
    """Pieces of a bucket sent and received by one rank, in order.

    In the first round, every rank sends each piece to the piece's first owner, which sums the pieces it receives. In
    the second round, the first owner sends the sum to the other owners.
    """

    sent: tuple[BucketPiece, ...]  # all pieces, by first owner
    sent_splits: tuple[int, ...]  # elements for each rank
    kept: tuple[BucketPiece, ...]  # pieces that this rank adds up, in the order in which each rank sends them
    passed: tuple[int, ...]  # positions in ``kept`` of what this rank sends in the second round, by rank
    passed_splits: tuple[int, ...]  # elements for each rank
    followed: tuple[BucketPiece, ...]  # pieces whose sum this rank receives, by rank
    followed_splits: tuple[int, ...]  # elements from each rank

    @property
    def passes_all(self) -> bool:
        """True if the pieces this rank sends on are exactly the pieces it sums, in the same order."""
        return self.passed == tuple(range(len(self.kept)))


def pieces_of(sizes: Sequence[int], spans: Sequence[Sequence[OwnedSpan]]) -> tuple[BucketPiece, ...]:
    """Return the pieces that result from dividing a bucket by its parameters' owners."""
    found, at = [], 0
    for param, (size, mine) in enumerate(zip(sizes, spans, strict=True)):
        found += [BucketPiece(param, span.start, at + span.start, span.length, span.owners) for span in mine]
        at += size
    return tuple(found)


def routes(pieces: Sequence[BucketPiece], rank: int, world_size: int) -> Routes:
    """Return the pieces of a bucket sent and received by `rank`; all ranks must pass the same pieces."""
    # Pieces of one pair of owners lie together, so that with two owners the sums are passed on as they lie.
    ordered = sorted(pieces, key=lambda piece: piece.owners)
    kept = [piece for piece in ordered if piece.owners[0] == rank]
    passed = [[i for i, piece in enumerate(kept) if peer in piece.owners[1:]] for peer in range(world_size)]
    followed = [
        [piece for piece in ordered if piece.owners[0] == peer and rank in piece.owners[1:]]
        for peer in range(world_size)
    ]
    return Routes(
        sent=tuple(ordered),
        sent_splits=_splits(world_size, lambda peer: [piece for piece in ordered if piece.owners[0] == peer]),
        kept=tuple(kept),
        passed=tuple(i for mine in passed for i in mine),
        passed_splits=_splits(world_size, lambda peer: [kept[i] for i in passed[peer]]),
        followed=tuple(piece for mine in followed for piece in mine),
        followed_splits=_splits(world_size, lambda peer: followed[peer]),
    )


def _splits(world_size: int, pieces: Callable[[int], Sequence[BucketPiece]]) -> tuple[int, ...]:
    return tuple(sum(piece.length for piece in pieces(peer)) for peer in range(world_size))
