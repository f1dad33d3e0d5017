"""Shard of a table held by one rank, and its moves when the group changes (torch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_ray.communication.communicator import Communicator
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.sync.sharded.placement import Move, RowTiling, from_words, hand_over, lost, moves, place, to_words
from elastic_ray.sync.sharded.rules import RowAdagrad, RowAdam, RowRule, RowSGD
from elastic_ray.sync.sharded.store import InitialRows, TileStore, whole_of

_Rows = Mapping[str, Tensor]


def update_rows(
    rule: RowRule, tensors: Mapping[str, Tensor], places: Tensor, gradient: Tensor, *, lr: float, step: int
) -> None:
    """Update some of a table's rows in place, using an update rule.

    Args:
        tensors: The table's weight (``weight``) and the rule's state, each [places, width].
        places: Positions of the rows in ``tensors``.
        gradient: Gradient of the rows, [len(places), width].
        step: Number of the update, starting at 1. ``lr`` is its learning rate.
    """
    rows = {name: tensor.index_select(0, places) for name, tensor in tensors.items()}
    _RULES[type(rule)](rule, rows, gradient, lr, step)
    for name, tensor in tensors.items():
        tensor.index_copy_(0, places, rows[name])


def _sgd(rule: RowSGD, rows: _Rows, gradient: Tensor, lr: float, step: int) -> None:
    rows["weight"].sub_(gradient * lr)


def _adagrad(rule: RowAdagrad, rows: _Rows, gradient: Tensor, lr: float, step: int) -> None:
    rows["sum"].add_(gradient * gradient)
    rows["weight"].sub_((gradient * lr).div_(rows["sum"].sqrt().add_(rule.eps)))


def _adam(rule: RowAdam, rows: _Rows, gradient: Tensor, lr: float, step: int) -> None:
    first, second = rule.betas
    rows["exp_avg"].mul_(first).add_(gradient * (1.0 - first))
    rows["exp_avg_sq"].mul_(second).add_((gradient * gradient).mul_(1.0 - second))
    rate = lr * math.sqrt(1.0 - second**step) / (1.0 - first**step)
    rows["weight"].sub_((rows["exp_avg"] * rate).div_(rows["exp_avg_sq"].sqrt().add_(rule.eps)))


_RULES: dict[type[RowRule], Callable[[Any, _Rows, Tensor, float, int], None]] = {
    RowSGD: _sgd,
    RowAdagrad: _adagrad,
    RowAdam: _adam,
}


def summed(pieces: list[tuple[Tensor, Tensor]], width: int) -> tuple[Tensor, Tensor]:
    """Return the sum of several row gradients, with unique ids in ascending order.

    Args:
        pieces: Ids [n] and gradients [n, width] to add, in this order; at least one pair. Ids must be unique within
            each pair.
    """
    if len(pieces) == 1:
        return pieces[0]
    ids, where = torch.unique(torch.cat([each for each, _ in pieces]), return_inverse=True)
    total = torch.zeros(len(ids), width, dtype=pieces[0][1].dtype, device=pieces[0][1].device)
    for at, (_, gradient) in zip(torch.split(where, [len(each) for each, _ in pieces]), pieces, strict=True):
        total.index_add_(0, at, gradient)
    return ids, total


_Matrix = Sequence[Sequence[int]]


class RowsLostError(LostGroupError):
    """Error raised if any rows of a sharded table have lost all owners; the job continues from a checkpoint."""


class TableShard:
    """Shard of a table held by one rank.

    Methods raise CommunicationFailedError if the group breaks; the rank then keeps its rows.

    Args:
        copies: Number of owners of each tile, limited by the number of ranks.
        like: Templates of ``weight`` and the rule's state: empty tensors, [0, width].
    """

    def __init__(self, tiling: RowTiling, copies: int, like: Mapping[str, Tensor], name: str) -> None:
        self._tiling, self._copies, self._like, self._name = tiling, copies, like, name
        self._stores: list[TileStore] = []
        self._owners: tuple[tuple[int, ...], ...] = ()
        self._source: InitialRows | None = None
        self._by_tile: Tensor = torch.empty(0, 0, dtype=torch.int64)
        self._world = 1

    @property
    def store(self) -> TileStore | None:
        """Rows held by this rank in the current group; None before the first group."""
        return self._stores[0] if self._stores else None

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self._like["weight"].device

    def start(self, source: InitialRows) -> None:
        """Replace all rows held by this rank with initial rows from ``source``."""
        self._stores, self._source = [], source

    def drop(self) -> None:
        """Drop all rows, because other ranks hold the valid ones."""
        self._stores, self._source = [], None

    def take(self, store: TileStore) -> None:
        """Hold the rows in ``store``, which this rank held during an earlier run in this process."""
        self._stores, self._source = [store], None

    def make_whole(self) -> None:
        """Hold all of the table's rows on this rank, because no group has been formed yet."""
        everything = tuple(range(self._tiling.tiles))
        self._set_owners(self._made(everything, self._source), tuple((0,) for _ in everything))

    def enter(self, communicator: Communicator, nodes: Sequence[str]) -> int:
        """Receive the tiles this rank owns in a new group; return the number of tiles sent between ranks.

        All ranks with rows must have made the same updates.

        Raises RowsLostError on every rank if no rank holds some of the rows.
        """
        tiles = self._tiling.tiles
        held = self._everyone_holds(communicator)
        if gone := lost(tiles, held):
            raise RowsLostError(
                f"{len(gone) / tiles:.0%} of the rows of ShardedEmbedding {self._name!r} were lost with the workers "
                f"that owned them (copies={self._copies}): no living worker holds them"
            )
        owners = place(tiles, held, nodes, self._copies)
        sent = moves(held, owners)
        mine = [tile for tile, owning in enumerate(owners) if communicator.rank in owning]
        received = {move.tile for move in sent if move.destination == communicator.rank}
        new = self._made(mine, self._source, leave=received)
        if sent:
            carry_out(communicator, sent, self._stores, new, self._tiling.height)
        self._stores.insert(0, new)  # ranks that are through with this do not hold any more what they have sent
        communicator.gather_ints([1])
        self._set_owners(new, owners, communicator.world_size)
        return len(sent)

    def _everyone_holds(self, communicator: Communicator) -> list[frozenset[int]]:
        """Return the tiles held by each rank."""
        tiles = self._tiling.tiles
        own = range(tiles) if self._source is not None else {tile for store in self._stores for tile in store.tiles}
        words = to_words(own, tiles)
        return [from_words(row, tiles) for row in communicator.gather_ints(words)]

    def _made(self, tiles: Sequence[int], source: InitialRows | None, leave: Any = ()) -> TileStore:
        """Return a store with these tiles, filled from held rows or ``source``; tiles in ``leave`` are not filled."""
        new = TileStore.empty(self._tiling, tiles, self._like)
        for tile in tiles:
            if tile in leave:
                continue
            holder = next((store for store in self._stores if tile in store.tiles), None)
            for name in self._like:
                into = new.tile(name, tile)
                if holder is not None:
                    into.copy_(holder.tile(name, tile))
                elif source is not None:
                    source.fill(name, tile, into)
        return new

    def _set_owners(self, store: TileStore, owners: tuple[tuple[int, ...], ...], world: int = 1) -> None:
        self._stores, self._owners, self._source, self._world = [store], owners, None, world
        self._by_tile = torch.tensor(owners, dtype=torch.int64, device=self.device)

    def hand_over(self, communicator: Communicator, stays: Sequence[bool]) -> None:
        """Send tiles owned only by leaving ranks to ranks that stay (``stays[r]`` for rank r); called on every rank."""
        given = hand_over(self._owners, stays)
        if not given:
            return
        mine = [move.tile for move in given if move.destination == communicator.rank]
        new = TileStore.empty(self._tiling, mine, self._like)
        carry_out(communicator, given, self._stores, new, self._tiling.height)
        self._stores.append(new)

    @property
    def everywhere(self) -> bool:
        """True if all ranks hold all of the table's rows."""
        return self._by_tile.shape[-1] == self._world

    def read(self, ids: Tensor) -> Tensor:
        """Return the rows with these ids, [len(ids), width]; this rank must hold all of them."""
        assert self.store is not None
        return self.store.rows(ids)

    def fetch(self, communicator: Communicator, ids: Tensor) -> Tensor:
        """Fetch rows from their owners, [len(ids), width]; called on every rank, with empty ``ids`` to fetch none."""
        store, readers = self.store, self._by_tile[:, 0]
        assert store is not None
        here = store.holds(ids)
        away = (~here).nonzero().squeeze(1)
        asked = readers[ids[away] % len(readers)]
        order = torch.argsort(asked, stable=True)
        away = away[order]
        matrix = _counts(communicator, asked)
        wanted = _swap(communicator, ids[away], matrix)
        given = _swap(communicator, store.rows(wanted), [list(column) for column in zip(*matrix, strict=True)])
        rows = given.new_empty(len(ids), given.shape[1])
        at = here.nonzero().squeeze(1)
        rows[at] = store.rows(ids[at])
        rows[away] = given
        return rows

    def push(self, communicator: Communicator, ids: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Send row gradients to the row owners; return ids and summed gradients for the rows this rank owns."""
        if communicator.world_size == 1:
            return ids, gradient
        owners = self._by_tile
        to = owners[ids % len(owners)]
        order = torch.argsort(to.reshape(-1), stable=True)
        which = torch.div(order, owners.shape[1], rounding_mode="floor")
        matrix = _counts(communicator, to.reshape(-1))
        got_ids = _swap(communicator, ids[which], matrix)
        got = _swap(communicator, gradient[which], matrix)
        splits = [row[communicator.rank] for row in matrix]
        pieces = zip(torch.split(got_ids, splits), torch.split(got, splits), strict=True)
        return summed(list(pieces), gradient.shape[1])

    def whole(self, communicator: Communicator | None, names: Sequence[str]) -> dict[str, Tensor] | None:
        """Return the complete table's named tensors on rank 0, None on other ranks; called on every rank."""
        store = self.store
        assert store is not None
        stores = [store]
        if communicator is not None and communicator.world_size > 1:
            first = communicator.rank == 0
            tiles = [tile for tile, mine in enumerate(self._owners) if 0 not in mine]
            like = {name: store.tensors[name] for name in names}
            stores.append(TileStore.empty(self._tiling, tiles if first else (), like))
            moved = [Move(tile, self._owners[tile][0], 0) for tile in tiles]
            carry_out(communicator, moved, (store,), stores[1], self._tiling.height)
            if not first:
                return None
        return {name: whole_of(self._tiling, name, stores) for name in names}


def carry_out(
    communicator: Communicator, moves: Sequence[Move], stores: Sequence[TileStore], into: TileStore, height: int
) -> None:
    """Send tiles of ``height`` rows between ranks; called on every rank with the same moves.

    Tiles are sent from ``stores`` and received in the store ``into``.
    """
    rank, world = communicator.rank, communicator.world_size
    matrix = [[0] * world for _ in range(world)]
    for move in moves:
        matrix[move.source][move.destination] += height
    mine = sorted((move for move in moves if move.source == rank), key=lambda move: (move.destination, move.tile))
    theirs = sorted((move for move in moves if move.destination == rank), key=lambda move: (move.source, move.tile))
    for name, like in into.tensors.items():
        parts = [next(each for each in stores if move.tile in each.tiles).tile(name, move.tile) for move in mine]
        sent = torch.cat(parts) if parts else like.new_empty(0, like.shape[1])
        for move, part in zip(theirs, torch.split(_swap(communicator, sent, matrix), height), strict=False):
            into.tile(name, move.tile).copy_(part)


def _counts(communicator: Communicator, to: Tensor) -> _Matrix:
    """Return the number of rows sent from each rank to each rank, given this rank's destinations."""
    return communicator.gather_ints(torch.bincount(to, minlength=communicator.world_size).tolist(), with_gradients=True)


def _swap(communicator: Communicator, tensor: Tensor, matrix: _Matrix) -> Tensor:
    """Exchange rows of a tensor sorted by destination, given the counts for each source and destination."""
    rank = communicator.rank
    mine, theirs = matrix[rank], [row[rank] for row in matrix]
    output = tensor.new_empty(sum(theirs), *tensor.shape[1:])
    if any(any(row) for row in matrix):
        communicator.wait(communicator.gradients.all_to_all(output, tensor.contiguous(), theirs, mine))
    return output
