"""Bucket with the touched rows of one table's gradient (torch)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_ray.sync.operations.gradient_checks import check_gradients
from elastic_ray.sync.tables.table_gradient import TableGradient
from elastic_ray.sync.tables.touched_rows import (
    RowPreconditioner,
    TouchedRows,
    added_up,
    no_rows,
    row_preconditioner,
    rows_of_dense,
)


class RowBucket:
    """Bucket that holds one table's gradient as rows, in place of a dense ``Bucket``.

    Attributes:
        complete: Whether the backward pass has reached the table.
        is_sparse: Whether ``.grad`` should be sparse; None if no rank has had a gradient in any micro-step so far.
        touched: Number of rows in this rank's gradient at the last call of :meth:`put`.
    """

    sliced = False  # each rank receives the whole mean
    is_summed_up = False  # the table's gradient does not change while it is reduced

    def __init__(self, index: int, group: int, table: TableGradient) -> None:
        self.index, self.group, self.table = index, group, table
        self.params = [table.param]
        self.complete = True
        self.held = no_rows(table.param)
        self.is_sparse: bool | None = None
        self.touched = 0
        self._carried: TouchedRows | None = None
        self._has_gradient = False
        self.used: list[bool] = []
        self.written: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._additions = 1  # of the pass to ``.grad``
        self._flat: torch.Tensor | None = None
        self._preconditioner: RowPreconditioner | None = None

    def start_pass(self, *, first: bool, reduces: bool, accumulates: bool) -> float:
        """Start a backward pass, leaving the table's gradient in its own memory during the pass."""
        self.complete, self._additions = True, 1
        if first:
            self.used, self.written, self.is_sparse = [], None, None
            if not accumulates:
                self._carried = None
        return math.inf

    def adopt(self, places: Sequence[int]) -> None:
        """Do nothing: the table's gradient never moves into a buffer during the pass."""

    def add_again(self, param: torch.Tensor) -> None:
        """Record that a nested backward pass adds to the gradient again."""
        self._additions += 1

    def mark_incomplete(self) -> None:
        """Record that the backward pass ended without reaching the table."""
        self.complete = False

    def carry(self) -> None:
        """Start another micro-step, keeping earlier micro-steps' rows for :meth:`carried_share`."""
        self._carried = self._kept()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the gradient."""
        return self.table.param.dtype

    @property
    def has_gradient(self) -> Sequence[bool]:
        """List with one flag: whether the table had a gradient on this rank when the bucket was filled."""
        return [self._has_gradient]

    def share(self, factor: float) -> Any:
        """Return a copy of the held rows multiplied by ``factor``, for adding to the held rows with :meth:`add`."""
        return self.held.scaled(factor)

    def carried_share(self, factor: float = 1.0) -> Any:
        """Return the rows kept by :meth:`carry`, multiplied by ``factor``; None if no rows were kept."""
        return self._carried if self._carried is None or factor == 1.0 else self._carried.scaled(factor)

    def flat_gradient(self) -> torch.Tensor:
        """Return the gradient of the entire table as one vector."""
        return self.held.to_dense().reshape(-1)

    def add(self, share: Any) -> None:
        """Add the result of :meth:`share` or :meth:`carried_share` to the held rows."""
        self.held = added_up([self.held, share])

    def add_vector(self, vector: torch.Tensor) -> None:
        """Add the non-zero rows of a vector that covers the entire table."""
        self.add(rows_of_dense(vector.view(self.table.param.shape).to(self.held.values.dtype)))

    def preconditioner(self, optimizer: torch.optim.Optimizer) -> RowPreconditioner | None:
        """Return the factors that the optimizer multiplies the table's gradients by; None if they are 1."""
        self._preconditioner = row_preconditioner(optimizer, self.table.param, self._preconditioner)
        return self._preconditioner

    def squared_norm(self, preconditioner: RowPreconditioner | None) -> torch.Tensor:
        """Return the held rows' squared norm after multiplication by the preconditioner."""
        return self.held.squared_norm(preconditioner)

    def total(self) -> torch.Tensor:
        """Return the sum of all elements in the held rows, in float32."""
        return self.held.values.sum().to(torch.float32)

    def is_finite(self) -> bool:
        """True if all held values are finite."""
        return bool(self.held.values.isfinite().all())

    def own_is_finite(self) -> bool:
        """True if this rank's gradients are finite, including gradients from earlier micro-steps."""
        grad = self.table.param.grad
        tensors = [] if grad is None else [grad._values() if grad.is_sparse else grad]
        if self._carried is not None:
            tensors.append(self._carried.values)
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def put(self, weight: float, *, sums: bool = False) -> None:
        """Put the gradient's weighted rows into the bucket, or no rows without a gradient.

        Raises RuntimeError if a hook has removed the gradient.
        """
        param = self.table.param
        self._has_gradient = param.grad is not None
        if param.grad is None:
            check_gradients(self.params, [None], complete=self.complete)
            self.held, self.touched = no_rows(param), 0
            return
        sparse = self.table.gives_sparse
        self.is_sparse = sparse if self.is_sparse is None else (self.is_sparse and bool(sparse))
        rows = self.table.rows()
        self.touched = rows.count
        if not weight:  # a mean over nothing is no number
            self.held = no_rows(param)
        elif rows.ids is None:
            self.held = TouchedRows(
                table=rows.table, ids=None, values=torch.mul(rows.values, weight, out=self._memory())
            )
        else:
            self.held = rows.scaled(weight)

    def check(self) -> None:
        """Raise the RuntimeError that :meth:`put` would raise, if any."""
        if self.table.param.grad is None:
            check_gradients(self.params, [None], complete=self.complete)

    def release(self) -> None:
        """Free the memory until it is needed again."""
        self.held, self._carried, self._flat = no_rows(self.table.param), None, None

    def record_used(self) -> None:
        """Record whether the table had a gradient, for later micro-steps in the same step."""
        self.used = [self._has_gradient or any(self.used)]

    def take(self, rows: TouchedRows, *, sparse: bool | None) -> None:
        """Store the rows summed over all ranks, and ``sparse``, the agreed :attr:`is_sparse`."""
        self.held, self.is_sparse = rows, sparse

    def fill_flat(self) -> torch.Tensor:
        """Return the gradient of the entire table in a buffer that can be reduced in place."""
        if self.held.ids is not None:
            flat = self._memory().zero_()
            flat.index_copy_(0, self.held.ids, self.held.values)
            self.held = TouchedRows(table=self.held.table, ids=None, values=flat)
        return self.held.values

    def write_back(self, used: Callable[[], Sequence[bool]]) -> None:
        """Copy the held rows into ``.grad`` if, according to ``used``, any rank had a gradient for the table."""
        param = self.table.param
        if param.grad is None and not any(used()):
            return
        self.table.write(self.held, sparse=bool(self.is_sparse))
        grad = param.grad
        if grad is not None:
            self.written = weakref.ref(grad), grad._version

    @property
    def goes_on(self) -> bool:
        """True if this pass has added to a gradient already reduced by an earlier pass, without zeroing in between."""
        grad = self.table.param.grad
        if self.written is None or grad is None:
            return False
        written, version = self.written
        return grad is written() and grad._version <= version + self._additions

    def replace_buffer(self) -> None:
        """Drop the whole-table buffer, because an abandoned reduction may still be writing to it."""
        self.held = self._kept()
        self._flat = None

    def _kept(self) -> TouchedRows:
        """Return the held rows in memory that is never written to."""
        return self.held if self.held.ids is not None else self.held.scaled(1.0)

    def _memory(self) -> torch.Tensor:
        """Return reused memory for an entire table, because fresh memory costs a third of a reduction's time."""
        if self._flat is None:
            self._flat = torch.empty_like(self.table.param.detach(), memory_format=torch.contiguous_format)
        return self._flat
