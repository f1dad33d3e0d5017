"""What an optimizer of Adam's kind multiplies rows of a table's gradient with, without a look at all others (torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic_ray.batch.statistics import denominators, least_denominator

# Of a table with more rows, so many stand for all where the size of a denominator is asked.
_SAMPLED_ROWS = 4096


class RowPreconditioner:
    """As ``batch.statistics.preconditioner``, for some rows at a time. It stays as it is while the optimizer goes on.

    Its floor is a thousandth of the root mean square of all denominators; of a large table, of every n-th row's.

    Args:
        state: of the table, copied.
        group: the optimizer's options.
        dtype: of the table.
        floor: the least denominator.
    """

    def __init__(
        self, state: Mapping[str, Any], group: Mapping[str, Any], dtype: torch.dtype, floor: torch.Tensor
    ) -> None:
        self.state = state
        self._group = group
        self._dtype = dtype
        self._floor = floor

    def of(self, ids: torch.Tensor | None) -> torch.Tensor:
        """1 / denominator of each element of these rows; of all for None."""
        state = self.state if ids is None else _cut(self.state, lambda table: table.index_select(0, ids))
        size = denominators(state, self._group, self._dtype)
        assert size is not None
        return torch.reciprocal(torch.maximum(size, self._floor))


@torch.no_grad()
def row_preconditioner(
    optimizer: torch.optim.Optimizer, table: torch.nn.Parameter, before: RowPreconditioner | None
) -> RowPreconditioner | None:
    """The present one; it takes the memory of the one ``before``. None where the optimizer divides by nothing yet."""
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
    """The same with some rows of each table."""
    return {k: rows(v) if isinstance(v, torch.Tensor) and v.ndim == 2 else v for k, v in state.items()}


def _copied(value: Any, memory: Any) -> Any:
    """A copy, in memory of a copy before where there is one."""
    if not isinstance(value, torch.Tensor):
        return value
    fits = isinstance(memory, torch.Tensor) and memory.shape == value.shape and memory.dtype == value.dtype
    return memory.copy_(value) if fits else value.clone()
