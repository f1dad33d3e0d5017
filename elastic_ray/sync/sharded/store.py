"""Table rows held by one rank, tile by tile, and the source of initial rows (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from elastic_ray.sync.sharded.placement import RowTiling


class TileStore:
    """Rows of some of a table's tiles, with their update rule's state.

    Args:
        tensors: Weight (``weight``) and the rule's state, each [len(tiles) * tiling.height, width], tile after tile.
    """

    def __init__(self, tiling: RowTiling, tiles: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        self.tiling = tiling
        self.tiles = tuple(tiles)
        self.tensors = tensors
        self._slots = torch.full((tiling.tiles,), -1, dtype=torch.int64)
        self._slots[list(tiles)] = torch.arange(len(tiles))
        self._slots = self._slots.to(tensors["weight"].device)

    @classmethod
    def empty(cls, tiling: RowTiling, tiles: Sequence[int], like: Mapping[str, Tensor]) -> TileStore:
        """Return a store with uninitialised memory for these tiles, with the same dtypes and widths as ``like``."""
        places = len(tiles) * tiling.height
        return cls(tiling, tiles, {name: each.new_empty(places, each.shape[1]) for name, each in like.items()})

    def holds(self, ids: Tensor) -> Tensor:
        """Return a mask that is True for each id in ``ids`` whose row is in this store."""
        return self._slots[ids % self.tiling.tiles] >= 0

    def places(self, ids: Tensor) -> Tensor:
        """Return the positions in this store's tensors of the rows with these ids; the store must hold them."""
        tiles = self.tiling.tiles
        return self._slots[ids % tiles] * self.tiling.height + torch.div(ids, tiles, rounding_mode="floor")

    def rows(self, ids: Tensor) -> Tensor:
        """Return a copy of the rows with these ids; this store must hold them."""
        return self.tensors["weight"].index_select(0, self.places(ids))

    def tile(self, name: str, tile: int) -> Tensor:
        """Return a tile's part of one tensor, [height, width], as a writable view.

        If the tile is one row shorter than ``height``, its last position is unused.
        """
        begin = int(self._slots[tile]) * self.tiling.height
        return self.tensors[name][begin : begin + self.tiling.height]


class InitialRows(Protocol):
    """Protocol for a source of a table's rows, used as long as no rank holds these rows."""

    @property
    def trained(self) -> bool:
        """True if the rows were loaded; False if they are newly initialised."""

    def fill(self, name: str, tile: int, into: Tensor) -> None:
        """Write a tile's part of the tensor called ``name`` (``weight`` or state) into ``into``, [height, width]."""


class SeededRows:
    """Random initial rows drawn tile by tile, so that all of a tile's owners draw the same values.

    Args:
        padding: Row set to zero; None for no such row.
        initial: Initial value of each tensor other than ``weight``.
    """

    trained = False

    def __init__(self, tiling: RowTiling, seed: int, std: float, padding: int | None, initial: Mapping[str, float]):
        self._tiling, self._seed, self._std, self._padding, self._initial = tiling, seed, std, padding, initial

    def fill(self, name: str, tile: int, into: Tensor) -> None:
        """Write a tile's part of tensor ``name`` into ``into``: random weights, or the rule's initial state."""
        if name != "weight":
            into.fill_(self._initial[name])
            return
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + tile) % (1 << 63))
        into.copy_(torch.empty(into.shape, dtype=into.dtype).normal_(0.0, self._std, generator=generator))
        if self._padding is not None and self._padding % self._tiling.tiles == tile:
            into[self._padding // self._tiling.tiles] = 0.0


class LoadedRows:
    """Complete table that was loaded, kept until this rank has copied the tiles it owns.

    Args:
        whole: Weight (``weight``) and the loaded tensors of the rule's state, each [rows, width].
        initial: Initial value for each state tensor that was not loaded.
    """

    trained = True

    def __init__(self, tiling: RowTiling, whole: Mapping[str, Tensor], initial: Mapping[str, float]) -> None:
        self._tiling, self._whole, self._initial = tiling, whole, initial

    def fill(self, name: str, tile: int, into: Tensor) -> None:
        """Write a tile's part of tensor ``name`` into ``into``: loaded values, or else the rule's initial state."""
        if name in self._whole:
            part = self._whole[name][tile :: self._tiling.tiles]
            into[: len(part)].copy_(part)
            into[len(part) :] = 0.0
        else:
            into.fill_(self._initial[name])


def whole_of(tiling: RowTiling, name: str, stores: Sequence[Any]) -> Tensor:
    """Return tensor ``name`` of a table, [rows, width], assembled from stores that hold all tiles between them."""
    first: Tensor = stores[0].tensors[name]
    whole = first.new_empty(tiling.rows, first.shape[1])
    for store in stores:
        for tile in store.tiles:
            whole[tile :: tiling.tiles] = store.tile(name, tile)[: tiling.rows_in(tile)]
    return whole
