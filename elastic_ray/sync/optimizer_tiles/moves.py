"""Transfer of optimizer state tiles between ranks (torch)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.state.tree import receive_state, send_state
from elastic_ray.sync.optimizer_tiles.states import State
from elastic_ray.sync.sharded.placement import Move


class StateLostError(LostGroupError):
    """Error raised if all owners of some tiles are lost; the job then continues from a checkpoint."""


def carry_out(
    communicator: Communicator, moves: Sequence[Move], give: Callable[[int], list[State]]
) -> Iterator[tuple[int, list[State]]]:
    """Send tiles of optimizer state to ranks that lack them; all ranks call this with the same moves.

    Callers must exhaust the iterator. Pairs of ranks communicate in a fixed order, which prevents deadlocks.

    Args:
        give: Returns, for a tile that this rank holds, the optimizer state of each of its spans.

    Yields:
        Tiles that this rank receives, with the states of their spans.

    Raises CommunicationFailedError: the group broke; all tiles yielded before are complete.
    """
    rank = communicator.rank
    for peer in peers(rank, communicator.world_size):
        mine = sorted(move.tile for move in moves if (move.source, move.destination) == (rank, peer))
        theirs = sorted(move.tile for move in moves if (move.source, move.destination) == (peer, rank))
        for sends in (rank < peer, rank > peer):
            if sends and mine:
                send_state(communicator, peer, {str(tile): give(tile) for tile in mine})
            elif not sends and theirs:
                trees, _ = receive_state(communicator, peer, lambda key: None)
                if sorted(trees) != sorted(map(str, theirs)):
                    communicator.mark_broken()
                    raise CommunicationFailedError(f"rank {peer} sent other tiles than was agreed on")
                for tile in theirs:
                    yield tile, trees[str(tile)]


def peers(rank: int, world_size: int) -> Iterator[int]:
    """Yield the peers of `rank` in rounds, in which each pair of ranks meets exactly once."""
    even = world_size + world_size % 2
    for number in range(even - 1):
        places = [0, *((number + i) % (even - 1) + 1 for i in range(even - 1))]
        at = places.index(rank)
        peer = places[even - 1 - at]
        if peer < world_size:
            yield peer
