"""Optimizer steps of tables: of the touched rows alone, where that is the same step (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic_ray.sync.tables.table_gradient import TableGradient


class RowSteps:
    """See the module's text. Optimizers whose step of a zero gradient changes nothing step rows; others the table.

    A momentum buffer that torch keeps as a sparse tensor grows with every step by the rows of its gradient, though most
    of them are there already: rows are put together after each step, so that it is the same on all ranks, and once
    half of the table's are there, it becomes dense.

    Args:
        optimizer: steps the tables.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._tables: Sequence[TableGradient] = ()
        self._hooks: list[Any] = []

    def follow(self, tables: Sequence[TableGradient]) -> None:
        """From now on there are these tables."""
        self._tables = tables
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if tables:
            self._hooks = [
                self._optimizer.register_step_pre_hook(self._before),
                self._optimizer.register_step_post_hook(self._after),
            ]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer steps; a hook of the user's that looks at gradients is to find them as always."""
        if len(optimizer._optimizer_step_pre_hooks) > 1 or type(optimizer) not in _EXACT:
            return
        by_rows = {id(p) for group in optimizer.param_groups if _is_exact(group) for p in group["params"]}
        for table in self._tables:
            if id(table.param) in by_rows:
                table.show_rows()

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """It has stepped."""
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for table in self._tables:
            table.show_table()
            state = optimizer.state.get(table.param, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_sparse:
                    state[key] = _tidy(value, may_be_dense=not groups[id(table.param)].get("nesterov"))


_EXACT = (torch.optim.SGD, torch.optim.Adagrad)


def _is_exact(group: Mapping[str, Any]) -> bool:
    """Whether steps of sparse gradients equal those of dense ones: rows whose gradient is zero stay as they are."""
    moves_all = group.get("weight_decay", 0) or group.get("momentum", 0)
    return not (moves_all or group.get("fused") or group.get("differentiable"))


def _tidy(value: torch.Tensor, *, may_be_dense: bool) -> torch.Tensor:
    """Each row once."""
    value = value.coalesce()
    return value.to_dense() if may_be_dense and 2 * value._nnz() > value.shape[0] else value
