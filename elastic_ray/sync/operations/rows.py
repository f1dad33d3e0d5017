"""Only the rows of a table travel that a step has touched: Parallax (EuroSys 2019) in collectives (torch).

First all ranks learn how many rows each of them has. Where these are few, all rows are gathered, padded to the
most that one rank has, and every rank adds them up in the order of ranks: equal bits everywhere. Where they are many,
the whole table is all-reduced instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_ray.sync.operations.protocol import GradientCollectives
from elastic_ray.sync.operations.row_bucket import RowBucket
from elastic_ray.sync.operations.touched_rows import TouchedRows, added_up, no_rows

# What a rank says of its gradient's layout; the largest counts.
_NONE, _SPARSE, _DENSE = 0, 1, 2
_ID_BYTES = 8


class RowsOperation:
    """See the module's text, and ``BucketOperation``, which this is. It keeps nothing from step to step."""

    def __init__(self) -> None:
        self._told: torch.Tensor | None = None
        self._gathered: torch.Tensor | None = None
        self._counts: list[int] = []
        self._sparse: bool | None = None

    def launch(self, bucket: RowBucket, group: GradientCollectives) -> Sequence[Any]:
        """How many rows each rank has, and in which layout."""
        layout = _NONE if bucket.is_sparse is None else _SPARSE if bucket.is_sparse else _DENSE
        device = bucket.table.param.device
        mine = torch.tensor([bucket.held.count, layout], dtype=torch.int64, device=device)
        self._told = torch.empty(2 * group.world_size, dtype=torch.int64, device=device)
        return (group.all_gather(self._told, mine),)

    def go_on(self, bucket: RowBucket, group: GradientCollectives, finished: int) -> Sequence[Any]:
        """The rows, or the whole table; then their sum."""
        if finished == 1:
            assert self._told is not None
            told = self._told.tolist()
            self._counts, layout = told[::2], max(told[1::2])
            self._sparse = None if layout == _NONE else layout == _SPARSE
            most = max(self._counts)
            if not most:
                bucket.take(no_rows(bucket.table.param), sparse=self._sparse)
                return ()
            if not pays(most, bucket.held.table, group.world_size):
                return (group.all_reduce(bucket.fill_flat()),)
            size = _nbytes(most, bucket.held.values)
            packed = _pack(bucket.held, size)
            self._gathered = torch.empty(group.world_size * size, dtype=torch.uint8, device=packed.device)
            return (group.all_gather(self._gathered, packed),)
        if self._gathered is None:
            bucket.take(bucket.held, sparse=self._sparse)
        else:
            pieces = self._gathered.view(group.world_size, -1)
            parts = [_unpack(piece, count, bucket.held) for piece, count in zip(pieces, self._counts, strict=True)]
            bucket.take(added_up(parts), sparse=self._sparse)
        self._told = self._gathered = None
        return ()

    def commit(self) -> None:
        """Nothing is kept."""

    def void(self) -> None:
        """Leave all memory to works that were given up."""
        self._told = self._gathered = None


def pays(most: int, table: int, world_size: int) -> bool:
    """Whether rows are gathered: together, padded to ``most`` of each rank, they are no more than the table has.

    By bytes the all-gather would win up to twice as many, but adding them up takes time too: measured, the two are
    equal at some 50 % of the rows with 2 ranks, and at 25 % with 4.
    """
    return most * world_size <= table


def _nbytes(count: int, values: torch.Tensor) -> int:
    """Bytes that so many rows take, with their numbers, in whole elements of all types."""
    nbytes = count * (_ID_BYTES + values.shape[1] * values.element_size())
    return -(-nbytes // 16) * 16


def _pack(rows: TouchedRows, size: int) -> torch.Tensor:
    """Numbers and rows one after the other, in ``size`` bytes."""
    packed = torch.empty(size, dtype=torch.uint8, device=rows.values.device)
    ids, values = _cut(packed, rows.count, rows)
    ids.copy_(rows.at())
    values.copy_(rows.values)
    return packed


def _unpack(packed: torch.Tensor, count: int, like: TouchedRows) -> TouchedRows:
    ids, values = _cut(packed, count, like)
    return TouchedRows(table=like.table, ids=ids, values=values)


def _cut(packed: torch.Tensor, count: int, like: TouchedRows) -> tuple[torch.Tensor, torch.Tensor]:
    width = like.values.shape[1]
    first, last = count * _ID_BYTES, count * (_ID_BYTES + width * like.values.element_size())
    return packed[:first].view(torch.int64), packed[first:last].view(like.values.dtype).view(count, width)
