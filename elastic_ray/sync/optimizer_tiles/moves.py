"""Transfer of parts of divided state between ranks (torch)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.state.tree import receive_state, send_state
from elastic_ray.sync.optimizer_tiles.states import State
from elastic_ray.sync.sharded.placement import Move

_Key = TypeVar("_Key")


class StateLostError(LostGroupError):
    """Error raised if any tile has lost all of its owners; the job then continues from a checkpoint."""


def carry_out(
    communicator: Communicator, moves: Sequence[Move], give: Callable[[int], list[State]]
) -> Iterator[tuple[int, list[State]]]:
    """Send tiles of optimizer state to ranks that lack them; see :func:`exchange`."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for move in sorted(moves, key=lambda move: move.tile):
        pairs.setdefault((move.source, move.destination), []).append(move.tile)
    return exchange(communicator, pairs, give)


def exchange(
    communicator: Communicator, pairs: Mapping[tuple[int, int], Sequence[_Key]], give: Callable[[_Key], Any]
) -> Iterator[tuple[_Key, Any]]:
    """Send parts of a state between ranks; called on every rank with the same parts.

    Callers must exhaust the iterator. Pairs of ranks communicate in a fixed order, which prevents deadlocks.

    Args:
        pairs: Parts to send, keyed by (source rank, destination rank); ``str()`` must differ between parts.
        give: Returns the content of a part held by this rank.

    Yields:
        Parts received by this rank, with their content.

    Raises CommunicationFailedError if the group breaks; all parts yielded before are complete.
    """
    rank = communicator.rank
    for peer in peers(rank, communicator.world_size):
        mine, theirs = pairs.get((rank, peer), ()), pairs.get((peer, rank), ())
        for sends in (rank < peer, rank > peer):
            if sends and mine:
                send_state(communicator, peer, {str(part): give(part) for part in mine})
            elif not sends and theirs:
                trees, _ = receive_state(communicator, peer, lambda key: None)
                if sorted(trees) != sorted(map(str, theirs)):
                    raise refused(communicator, peer)
                yield from ((part, trees[str(part)]) for part in theirs)


def refused(communicator: Communicator, peer: int) -> CommunicationFailedError:
    """Break the group because a peer sent unexpected data; return the error to raise."""
    communicator.mark_broken()
    return CommunicationFailedError(f"rank {peer} sent something else than was agreed on")


def peers(rank: int, world_size: int) -> Iterator[int]:
    """Yield the peers of `rank` round by round, such that each pair of ranks meets exactly once."""
    even = world_size + world_size % 2
    for number in range(even - 1):
        places = [0, *((number + i) % (even - 1) + 1 for i in range(even - 1))]
        at = places.index(rank)
        peer = places[even - 1 - at]
        if peer < world_size:
            yield peer
