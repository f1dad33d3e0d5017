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
    accessor = BlockAccessor.for_block(table)
    if isinstance(collate, PandasBatchCollateFn):
        return collate(accessor.to_pandas())
    columns: Any = accessor.to_numpy()
    if collate is not None:
        return collate(columns)
    return {name: tensor(values) for name, values in columns.items()}


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
