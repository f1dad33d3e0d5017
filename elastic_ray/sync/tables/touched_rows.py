"""Gradient of a table that has few non-zero rows, and arithmetic on these rows (torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic_ray.sync.preconditioners import denominators, least_denominator, squared_norm

# Of a table with more rows, so many stand for all where the size of a denominator is asked.
_SAMPLED_ROWS = 4096


class RowPreconditioner:
    """Row-wise preconditioner, computed like ``sync.preconditioners.preconditioner`` and fixed until recomputed.

    Denominators are at least a hundredth of the root mean square over all denominators; for a large table, the root
    mean square is computed from every n-th row.
    """

    def __init__(
        self, state: Mapping[str, Any], group: Mapping[str, Any], dtype: torch.dtype, floor: torch.Tensor
    ) -> None:
        self.state, self._group, self._dtype, self._floor = state, group, dtype, floor

    def of(self, ids: torch.Tensor | None) -> torch.Tensor:
        """Return 1 / denominator for each element of the rows with the given ids; None selects all rows."""
        state = self.state if ids is None else _cut(self.state, lambda table: table.index_select(0, ids))
        size = denominators(state, self._group, self._dtype)
        assert size is not None
        return torch.reciprocal(torch.maximum(size, self._floor))


@torch.no_grad()
def row_preconditioner(
    optimizer: torch.optim.Optimizer, table: torch.nn.Parameter, before: RowPreconditioner | None
) -> RowPreconditioner | None:
    """Return a table's preconditioner for the optimizer's current state, in the memory of ``before`` if given.

    Returns None if the optimizer does not divide gradients yet.
    """
    state = {key: value for key, value in optimizer.state.get(table, {}).items() if key in _USED}
    group = next((each for each in optimizer.param_groups if any(p is table for p in each["params"])), {})
    every = max(1, table.shape[0] // _SAMPLED_ROWS)
    size = denominators(_cut(state, lambda tensor: tensor[::every]), group, table.dtype)
    if size is None:
        return None
    old = before.state if before is not None else {}
    copies = {key: _copied(value, old.get(key)) for key, value in state.items()}
    return RowPreconditioner(copies, dict(group), table.dtype, least_denominator(size))


_USED = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "exp_inf", "sum", "acc_delta", "step")


def _cut(state: Mapping[str, Any], rows: Any) -> dict[str, Any]:
    """Select rows from each table in an optimizer state."""
    return {k: rows(v) if isinstance(v, torch.Tensor) and v.ndim == 2 else v for k, v in state.items()}


def _copied(value: Any, memory: Any) -> Any:
    """Return a copy of the value, in the memory of an earlier copy if it fits."""
    if not isinstance(value, torch.Tensor):
        return value
    fits = isinstance(memory, torch.Tensor) and memory.shape == value.shape and memory.dtype == value.dtype
    return memory.copy_(value) if fits else value.clone()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TouchedRows:
    """Gradient of a table, stored as its touched rows.

    An object's tensors are never changed; all methods return new memory.
    """

    table: int
    ids: torch.Tensor | None  # [k] numbers of the rows, ascending and each once; None where they are all
    values: torch.Tensor  # [k, d] the rows

    @property
    def count(self) -> int:
        """Number of touched rows."""
        return self.values.shape[0]

    def at(self) -> torch.Tensor:
        """Return the ids of the held rows; all row ids if the entire table is held."""
        return torch.arange(self.table, device=self.values.device) if self.ids is None else self.ids

    def marks(self) -> torch.Tensor:
        """Return a flag for each row of the table, as a tensor: 1 if the row is held, otherwise 0."""
        marks = torch.zeros(self.table, dtype=torch.int32, device=self.values.device)
        return marks.index_fill_(0, self.at(), 1)

    def only(self, marks: torch.Tensor) -> TouchedRows:
        """Return the rows whose flag in ``marks`` is not 0; `self` must hold the entire table."""
        ids = marks.nonzero().squeeze(1)
        if ids.numel() == self.table:
            return self
        return dataclasses.replace(self, ids=ids, values=self.values.index_select(0, ids))

    def scaled(self, factor: float) -> TouchedRows:
        """Return the gradient with all rows multiplied by ``factor``."""
        return dataclasses.replace(self, values=self.values * factor)

    def squared_norm(self, preconditioner: RowPreconditioner | None) -> torch.Tensor:
        """Return ||P g||^2 for the gradient g and a diagonal preconditioner P (None: identity)."""
        return squared_norm(self.values.reshape(-1), self.of(preconditioner))

    def of(self, weights: RowPreconditioner | None) -> torch.Tensor | None:
        """Return a preconditioner's factors for these rows as a flat tensor; None if ``weights`` is None."""
        return None if weights is None else weights.of(self.ids).reshape(-1)

    def to_dense(self) -> torch.Tensor:
        """Return the gradient as a dense table."""
        if self.ids is None:
            return self.values.clone()
        return self.values.new_zeros(self.table, self.values.shape[1]).index_copy_(0, self.ids, self.values)

    def to_sparse(self) -> torch.Tensor:
        """Return the gradient as a coalesced sparse tensor, in new memory."""
        shape = (self.table, self.values.shape[1])
        return torch.sparse_coo_tensor(
            self.at()[None].clone(), self.values.clone(), shape, is_coalesced=True, check_invariants=False
        )


def no_rows(param: torch.Tensor) -> TouchedRows:
    """Return a gradient without rows, for an unused table."""
    none = torch.empty(0, dtype=torch.int64, device=param.device)
    return TouchedRows(table=param.shape[0], ids=none, values=param.detach().new_empty(0, param.shape[1]))


def rows_of_sparse(grad: torch.Tensor) -> TouchedRows:
    """Return the rows of a sparse gradient, summing duplicates."""
    grad = grad.detach().coalesce()
    return TouchedRows(table=grad.shape[0], ids=grad._indices()[0], values=grad._values())


def rows_of_dense(grad: torch.Tensor) -> TouchedRows:
    """Return the non-zero rows of a dense gradient, including rows with NaN; this scans the entire gradient."""
    ids = ((grad.amax(1) != 0) | (grad.amin(1) != 0)).nonzero().squeeze(1)
    if ids.numel() == grad.shape[0]:
        return TouchedRows(table=grad.shape[0], ids=None, values=grad)
    return TouchedRows(table=grad.shape[0], ids=ids, values=grad.index_select(0, ids))


def added_up(parts: Sequence[TouchedRows]) -> TouchedRows:
    """Return the sum of several gradients; bitwise reproducible if the parts are in the same order."""
    first = parts[0]
    if any(part.ids is None for part in parts):
        total = next(part for part in parts if part.ids is None)
        values = total.values.clone()
        for part in parts:
            if part is not total:
                values = values.add_(part.values) if part.ids is None else values.index_add_(0, part.ids, part.values)
        return dataclasses.replace(first, ids=None, values=values)
    all_ids = torch.cat([part.at() for part in parts])
    if first.values.dtype == torch.float32 and not first.values.is_cuda:
        return _added_up_in_bags(parts, all_ids)
    ids, places = torch.unique(all_ids, return_inverse=True)
    values = first.values.new_zeros(ids.numel(), first.values.shape[1])
    for part, place in zip(parts, places.split([part.count for part in parts]), strict=True):
        values.index_add_(0, place, part.values)
    return dataclasses.replace(first, ids=ids, values=values)


def _added_up_in_bags(parts: Sequence[TouchedRows], all_ids: torch.Tensor) -> TouchedRows:
    """Return the sum using ``embedding_bag``, with each row as a bag of its parts in order; over twice as fast."""
    ids, order = torch.sort(all_ids, stable=True)
    ids, counts = torch.unique_consecutive(ids, return_counts=True)
    bags = torch.cumsum(counts, 0).sub_(counts)
    values = torch.cat([part.values for part in parts])
    summed = torch.nn.functional.embedding_bag(order, values, bags, mode="sum")
    return dataclasses.replace(parts[0], ids=ids, values=summed)
