"""Rows between ranks: who asks whom for what, in collectives that can be called off (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from elastic_ray.communication.communicator import Communicator
from elastic_ray.sync.sharded.placement import Move
from elastic_ray.sync.sharded.store import TileStore

_Matrix = Sequence[Sequence[int]]


def fetch(communicator: Communicator, store: TileStore, readers: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table from those that answer for them; all ranks call it, also with no ids.

    Args:
        communicator: the group.
        store: what this rank holds.
        readers: the rank to ask, by tile.
        ids: of the rows, [n].

    Returns:
        The rows, [n, width].
    """
    here = store.holds(ids)
    away = (~here).nonzero().squeeze(1)
    asked = readers[ids[away] % len(readers)]
    order = torch.argsort(asked, stable=True)
    away = away[order]
    matrix = _counts(communicator, asked)
    wanted = _swap(communicator, ids[away], matrix)
    given = _swap(communicator, store.rows(wanted), _turned(matrix))
    rows = given.new_empty(len(ids), given.shape[1])
    at = here.nonzero().squeeze(1)
    rows[at] = store.rows(ids[at])
    rows[away] = given
    return rows


def push(communicator: Communicator, owners: Tensor, ids: Tensor, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Row gradients to all owners of each row; all ranks call it, also with no ids.

    Args:
        communicator: the group.
        owners: of each tile, [tiles, copies].
        ids: of the rows, each once, [n].
        gradient: theirs, [n, width].

    Returns:
        By rank what it has for the rows that this rank owns: ids and gradients, in the order of its ids.
    """
    to = owners[ids % len(owners)]
    order = torch.argsort(to.reshape(-1), stable=True)
    which = torch.div(order, owners.shape[1], rounding_mode="floor")
    matrix = _counts(communicator, to.reshape(-1))
    got_ids = _swap(communicator, ids[which], matrix)
    got = _swap(communicator, gradient[which], matrix)
    splits = [row[communicator.rank] for row in matrix]
    return list(zip(torch.split(got_ids, splits), torch.split(got, splits), strict=True))


def carry_out(
    communicator: Communicator, moves: Sequence[Move], stores: Sequence[TileStore], into: TileStore, height: int
) -> None:
    """Tiles from ranks that hold them to others; all ranks call it with the same moves.

    Args:
        communicator: the group.
        moves: which tiles.
        stores: what this rank holds.
        into: what it receives is written there.
        height: places of a tile.
    """
    rank, world = communicator.rank, communicator.world_size
    matrix = [[0] * world for _ in range(world)]
    for move in moves:
        matrix[move.source][move.destination] += height
    mine = sorted((move for move in moves if move.source == rank), key=lambda move: (move.destination, move.tile))
    theirs = sorted((move for move in moves if move.destination == rank), key=lambda move: (move.source, move.tile))
    for name, like in into.tensors.items():
        parts = [_holder(stores, move.tile).tile(name, move.tile) for move in mine]
        sent = torch.cat(parts) if parts else like.new_empty(0, like.shape[1])
        for move, part in zip(theirs, torch.split(_swap(communicator, sent, matrix), height), strict=False):
            into.tile(name, move.tile).copy_(part)


def collect(
    communicator: Communicator, owners: Sequence[Sequence[int]], store: TileStore, height: int, names: Sequence[str]
) -> TileStore | None:
    """All tiles to rank 0, of these tensors, from their first owners; all ranks call it, None on the others."""
    tiles = [tile for tile, mine in enumerate(owners) if 0 not in mine]
    moves = [Move(tile, owners[tile][0], 0) for tile in tiles]
    like: Mapping[str, Tensor] = {name: store.tensors[name] for name in names}
    found = TileStore.empty(store.tiling, tiles if communicator.rank == 0 else (), like)
    carry_out(communicator, moves, (store,), found, height)
    return found if communicator.rank == 0 else None


def _holder(stores: Sequence[TileStore], tile: int) -> TileStore:
    return next(store for store in stores if tile in store.tiles)


def _counts(communicator: Communicator, to: Tensor) -> _Matrix:
    """How many rows each rank sends to each, from the destinations of this one's."""
    return communicator.gather_ints(torch.bincount(to, minlength=communicator.world_size).tolist(), with_gradients=True)


def _turned(matrix: _Matrix) -> _Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


def _swap(communicator: Communicator, tensor: Tensor, matrix: _Matrix) -> Tensor:
    """Rows of a tensor to the ranks, in rank order, as many as the matrix says of source and destination."""
    rank = communicator.rank
    mine, theirs = matrix[rank], [row[rank] for row in matrix]
    output = tensor.new_empty(sum(theirs), *tensor.shape[1:])
    if any(any(row) for row in matrix):
        communicator.wait(communicator.gradients.all_to_all(output, tensor.contiguous(), theirs, mine))
    return output
