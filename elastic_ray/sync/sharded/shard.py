"""One rank's part of a table: what it holds, and how it follows the group (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_ray.communication.communicator import Communicator
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.sync.sharded.exchange import carry_out, collect, fetch, push
from elastic_ray.sync.sharded.placement import hand_over, lost, moves, place
from elastic_ray.sync.sharded.row_updates import summed
from elastic_ray.sync.sharded.store import InitialRows, TileStore, whole_of
from elastic_ray.sync.sharded.tiles import RowTiling, from_words, to_words


class RowsLostError(LostGroupError):
    """Rows of a sharded table were lost with all their owners: the job goes on from its last checkpoint."""


class TableShard:
    """One rank's rows of a table. Methods raise CommunicationFailedError where the group breaks; rows held are kept.

    Args:
        tiling: of the table.
        copies: owners of each tile, in a group of so many ranks or more.
        like: ``weight`` and the rule's state as empty tensors, [0, width].
        name: of the table, for errors.
    """

    def __init__(self, tiling: RowTiling, copies: int, like: Mapping[str, Tensor], name: str) -> None:
        self._tiling = tiling
        self._copies = copies
        self._like = like
        self._name = name
        self._stores: list[TileStore] = []
        self._owners: tuple[tuple[int, ...], ...] = ()
        self._source: InitialRows | None = None
        self._by_tile: Tensor = torch.empty(0, 0, dtype=torch.int64)
        self._world = 1

    @property
    def store(self) -> TileStore | None:
        """What this rank holds in the present group; None before the first."""
        return self._stores[0] if self._stores else None

    @property
    def device(self) -> torch.device:
        """Of the rows."""
        return self._like["weight"].device

    def begin(self, source: InitialRows) -> None:
        """Nothing is held; rows come from there."""
        self._stores, self._source = [], source

    def drop(self) -> None:
        """Nothing is held, and others hold what counts."""
        self._stores, self._source = [], None

    def take(self, store: TileStore) -> None:
        """What was held before a rerun."""
        self._stores, self._source = [store], None

    def make_whole(self) -> None:
        """Hold all tiles, in a process that is alone."""
        everything = tuple(range(self._tiling.tiles))
        self._follow(self._made(everything, self._source), tuple((0,) for _ in everything))

    def enter(self, communicator: Communicator, nodes: Sequence[str]) -> int:
        """Hold what this rank owns in a new group; all ranks hold rows of the same update, or none.

        Args:
            communicator: the group.
            nodes: the node of each rank.

        Returns:
            How many tiles were sent between ranks.

        Raises:
            RowsLostError: no rank holds some rows; raised on every rank.
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
        self._follow(new, owners, communicator.world_size)
        return len(sent)

    def _everyone_holds(self, communicator: Communicator) -> list[frozenset[int]]:
        """The tiles of each rank."""
        tiles = self._tiling.tiles
        own = range(tiles) if self._source is not None else {tile for store in self._stores for tile in store.tiles}
        words = to_words(own, tiles)
        return [from_words(row, tiles) for row in communicator.gather_ints(words)]

    def _made(self, tiles: Sequence[int], source: InitialRows | None, leave: Any = ()) -> TileStore:
        """A store of these tiles, from what is held or could be made; those to ``leave`` are empty yet."""
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

    def _follow(self, store: TileStore, owners: tuple[tuple[int, ...], ...], world: int = 1) -> None:
        self._stores, self._owners, self._source, self._world = [store], owners, None, world
        self._by_tile = torch.tensor(owners, dtype=torch.int64, device=self.device)

    def hand_over(self, communicator: Communicator, stays: Sequence[bool]) -> None:
        """Before some ranks leave: have those that stay hold what only the leavers own; all ranks call it.

        Args:
            communicator: the present group.
            stays: whether each of its ranks does.
        """
        given = hand_over(self._owners, stays)
        if not given:
            return
        mine = [move.tile for move in given if move.destination == communicator.rank]
        new = TileStore.empty(self._tiling, mine, self._like)
        carry_out(communicator, given, self._stores, new, self._tiling.height)
        self._stores.append(new)

    @property
    def everywhere(self) -> bool:
        """Whether all ranks hold all rows."""
        return self._by_tile.shape[-1] == self._world

    def read(self, ids: Tensor) -> Tensor:
        """Rows that are all here."""
        assert self.store is not None
        return self.store.rows(ids)

    def fetch(self, communicator: Communicator, ids: Tensor) -> Tensor:
        """Rows from wherever they are, [len(ids), width]; all ranks call it, also without ids."""
        assert self.store is not None
        return fetch(communicator, self.store, self._by_tile[:, 0], ids)

    def push(self, communicator: Communicator, ids: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' gradients of rows that this rank owns, added up in rank order; all ranks call it.

        Args:
            communicator: the group.
            ids: of this rank's rows, each once.
            gradient: theirs, weighted by samples.
        """
        if communicator.world_size == 1:
            return ids, gradient
        return summed(push(communicator, self._by_tile, ids, gradient), gradient.shape[1])

    def whole(self, communicator: Communicator | None, names: Sequence[str]) -> dict[str, Tensor] | None:
        """The whole table on rank 0, None elsewhere; all ranks call it.

        Args:
            communicator: the group; None before the first.
            names: which of its tensors.
        """
        store = self.store
        assert store is not None
        stores = [store]
        if communicator is not None and communicator.world_size > 1:
            found = collect(communicator, self._owners, store, self._tiling.height, names)
            if found is None:
                return None
            stores.append(found)
        return {name: whole_of(self._tiling, name, stores) for name in names}
