"""Optimizer steps on just the touched rows of tables, if this equals a step on the entire table (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic_ray.sync.step_hooks import InnerHook
from elastic_ray.sync.tables.table_gradient import TableGradient


class RowSteps:
    """Optimizer steps on just the touched rows of tables, if a zero gradient gives a zero update.

    A step on rows is equivalent to a step on the entire table, but not always bit-identical. The choice between the two
    must therefore not depend on anything that may differ between ranks, such as user hooks, which always see dense
    gradients.

    A sparse momentum buffer grows by the rows of the gradient in each step, even if it already holds most of them.
    Duplicate rows are therefore merged after each step, in the same way on all ranks, and the buffer becomes dense once
    it holds half of the table's rows. It also becomes dense before a step with a dense gradient (for example, after a
    strategy change), because torch cannot add that to a sparse buffer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._tables: Sequence[TableGradient] = ()
        self._looks = True  # sparse buffers may be there without tables
        self.idle = False  # there is nothing to do until :meth:`recheck`
        optimizer.register_load_state_dict_post_hook(lambda _: self.recheck())
        self._hooks: tuple[Any, Any] | None = None

    def adapt(self, tables: Sequence[TableGradient]) -> None:
        """Set the tables whose touched rows alone are stepped."""
        self._tables = tables
        self.recheck()

    def recheck(self) -> None:
        """Check sparse momentum buffers again at the next step, because the state or layout may have changed."""
        self._looks, self.idle = True, False

    def stand_inside(self) -> None:
        """Register hooks that show only rows to the optimizer's step, while all user hooks see entire tables."""
        # Also where there are no tables: a checkpoint of another strategy brings sparse buffers too.
        needed = bool(self._tables) or self._looks
        if needed and self._hooks is None:
            self._hooks = (
                self._optimizer.register_step_pre_hook(InnerHook(self._before)),
                self._optimizer.register_step_post_hook(InnerHook(self._after)),
            )
        elif not needed and self._hooks is not None:
            for hook in self._hooks:
                hook.remove()
            self._hooks = None
        self.idle = not needed
        if self._tables and self._hooks is not None:
            before, after = self._hooks
            befores: Any = self._optimizer._optimizer_step_pre_hooks  # an OrderedDict, whatever torch declares
            afters: Any = self._optimizer._optimizer_step_post_hooks
            befores.move_to_end(before.id)
            afters.move_to_end(after.id, last=False)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Show the rows to the optimizer before its step."""
        if self._tables or self._looks:  # else a walk over all parameters in every step, for nothing
            self._looks = _suit_momentum(optimizer)
        if not self._tables or type(optimizer) not in _EXACT:
            return
        by_rows = {id(p) for group in optimizer.param_groups if _is_exact(group) for p in group["params"]}
        for table in self._tables:
            if id(table.param) in by_rows:
                table.show_rows()

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Restore the tables after the optimizer's step."""
        if not self._tables:
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for table in self._tables:
            table.show_table()
            state = optimizer.state.get(table.param, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_sparse:
                    state[key] = _tidy(value, may_be_dense=not groups[id(table.param)].get("nesterov"))


_EXACT = (torch.optim.SGD, torch.optim.Adagrad)


def _is_exact(group: Mapping[str, Any]) -> bool:
    """True if sparse steps equal dense ones, i.e. rows with a zero gradient do not change."""
    moves_all = group.get("weight_decay", 0) or group.get("momentum", 0)
    return not (moves_all or group.get("fused") or group.get("differentiable"))


@torch.no_grad()
def _suit_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Convert SGD's momentum buffers to a layout that torch can add to their gradients.

    Returns True if any buffer is still sparse; it must be converted again if its gradient's layout changes.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    sparse = False
    for group in optimizer.param_groups:
        for p in group["params"] if group["momentum"] else ():
            state = optimizer.state.get(p, {})
            buffer, grad = state.get("momentum_buffer"), p.grad
            if buffer is not None and grad is not None and buffer.is_sparse != grad.is_sparse:
                if buffer.is_sparse:
                    state["momentum_buffer"] = buffer.to_dense()
                elif group["nesterov"]:  # adds the buffer to the gradient
                    state["momentum_buffer"] = buffer.to_sparse(1)
            kept = state.get("momentum_buffer")
            sparse = sparse or (kept is not None and kept.is_sparse)
    return sparse


def _tidy(value: torch.Tensor, *, may_be_dense: bool) -> torch.Tensor:
    """Return the sparse tensor with duplicate rows merged; dense if allowed and over half of its rows are present."""
    value = value.coalesce()
    return value.to_dense() if may_be_dense and 2 * value._nnz() > value.shape[0] else value
