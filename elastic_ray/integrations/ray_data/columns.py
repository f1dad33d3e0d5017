"""SHELL over Ray Data: rows of its blocks as batches (torch, NumPy)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from ray.data.block import BlockAccessor
from ray.data.collate_fn import ArrowBatchCollateFn, PandasBatchCollateFn


def cut(block: Any, first: int, end: int) -> Any:
    """Rows ``first`` to ``end`` of a block, the last not included, as an Arrow table that shares its memory."""
    accessor = BlockAccessor.for_block(block)
    table = block if isinstance(block, pa.Table) else accessor.to_arrow()
    return table.slice(first, end - first)


def to_batch(pieces: Sequence[Any], collate: Callable[[Any], Any] | None) -> Any:
    """One batch of the rows of these tables.

    Args:
        pieces: Arrow tables of one schema, in order.
        collate: the user's, as Ray Data's ``collate_fn``; None gives a dict from column to what :func:`tensor` makes.
    """
    table = pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces, promote_options="default")
    if isinstance(collate, ArrowBatchCollateFn):
        return collate(table)
    if isinstance(collate, PandasBatchCollateFn):
        return collate(BlockAccessor.for_block(table).to_pandas())
    if collate is not None:
        return collate(BlockAccessor.for_block(table).to_numpy())
    return {name: _column(table, name) for name in table.column_names}


def _column(table: Any, name: str) -> Any:
    """A column of an Arrow table, as :func:`tensor` makes it; lists of one length in one go."""
    column = table.column(name)
    chunks = [_matrix(chunk) for chunk in column.chunks if len(chunk)]
    if chunks and all(chunk is not None and chunk.shape[1] == chunks[0].shape[1] for chunk in chunks):
        return torch.from_numpy(np.concatenate(chunks))  # a copy, also of a single one
    values: Any = BlockAccessor.for_block(table).to_numpy(name)
    return tensor(values)


def _matrix(chunk: Any) -> Any:
    """Lists of numbers, all of one length, as an array [rows, length]; None for anything else."""
    kind = chunk.type
    if not (pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    if chunk.null_count or not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        return None
    numbers = chunk.flatten()
    if not pa.types.is_fixed_size_list(kind) and len(np.unique(np.diff(chunk.offsets))) > 1:
        return None
    return None if numbers.null_count else numbers.to_numpy().reshape(len(chunk), -1)


def tensor(values: np.ndarray[Any, Any]) -> Any:
    """A column as a tensor [rows, ...]; what torch has no type for (text, bytes, times, nulls) as a list of values."""
    if values.dtype == object and len(values) and all(isinstance(each, np.ndarray) for each in values):
        shapes = {each.shape for each in values}
        if len(shapes) > 1:
            return [tensor(each) for each in values]
        values = np.stack(list(values))
    if values.dtype.kind not in "biufc":
        return values.tolist()
    return torch.from_numpy(np.array(values))  # a copy: what Arrow holds is not to be written
