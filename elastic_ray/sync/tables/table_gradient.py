"""Gradient of a table as its touched rows, and as the ``.grad`` seen by user code (torch).

The cost of an embedding's backward pass is proportional to the entire table if its gradient is dense, but only to the
touched rows if it is sparse. Layers without ``sparse=True`` are therefore made to compute sparse gradients as well.
These are written to dense gradients in memory kept between steps, so that only rows are ever written. User code sees
the layout that it expects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_ray.sync.tables.sparse_backward import SparseBackward
from elastic_ray.sync.tables.touched_rows import TouchedRows, rows_of_dense, rows_of_sparse

# After a look at a whole gradient that was in vain, so many steps at most go by without another.
_LONGEST_PAUSE = 64


class TableGradient:
    """Record of the touched rows in a table's ``.grad``, and of the layout seen by user code.

    Args:
        update: Layout of ``.grad``: ``"sparse"``, ``"dense"``, or ``"auto"`` for the layout implied by the layers'
            ``sparse`` setting.
    """

    def __init__(self, param: torch.nn.Parameter, update: str) -> None:
        self.param = param
        self._shows = update
        self._handles: list[Any] = []
        self._layers: list[SparseBackward] = []
        self._own: torch.Tensor | None = None  # memory of dense gradients
        # The dense gradient of which all rows but these are zero, as long as its version is this.
        self._known: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None
        self._shown: weakref.ref[torch.Tensor] | None = None  # the dense gradient that was last made of that memory
        self._incoming: torch.Tensor | None = None
        self._aside: torch.Tensor | None = None
        self._pause, self._left = 0, 0

    def adapt(self, layers: Sequence[torch.nn.Module]) -> None:
        """Attach hooks to the given layers, which must include every layer that uses the table."""
        if self._shows == "auto" and not any(getattr(layer, "sparse", False) for layer in layers):
            self._shows = "dense"
        if self._shows == "auto":
            return
        trained = self.param.requires_grad
        self.param.requires_grad_(True)  # torch takes no hook for one that is frozen for the moment
        self._handles = [
            self.param.register_hook(self._before),  # type: ignore[no-untyped-call]
            self.param.register_post_accumulate_grad_hook(weak_hook(self._after)),  # type: ignore[no-untyped-call]
        ]
        self.param.requires_grad_(trained)
        self._layers = [SparseBackward(layer, self.param) for layer in layers]

    def close(self) -> None:
        """Remove all hooks from the table and its layers."""
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            layer.close()
        self._handles, self._layers = [], []

    @property
    def gives_sparse(self) -> bool | None:
        """True if ``.grad`` must be sparse, False if dense; None without a gradient."""
        if self.param.grad is None:
            return None
        return self.param.grad.is_sparse if self._shows == "auto" else self._shows == "sparse"

    def show_rows(self) -> None:
        """Replace a dense ``.grad`` with its touched rows (if known) until :meth:`show_table` is called."""
        grad, self._aside = self.param.grad, None  # an optimizer that has failed did not come to show_table
        ids = self._touched(grad)
        if grad is not None and ids is not None:
            rows = TouchedRows(table=grad.shape[0], ids=ids, values=grad.detach().index_select(0, ids))
            self._aside, self.param.grad = grad, rows.to_sparse()

    def show_table(self) -> None:
        """Restore the dense ``.grad`` replaced in :meth:`show_rows`."""
        if self._aside is not None:
            self.param.grad, self._aside = self._aside, None

    def rows(self) -> TouchedRows:
        """Return the touched rows of ``.grad``, which must exist. The result may share memory with ``.grad``."""
        grad = self.param.grad
        assert grad is not None
        if grad.is_sparse:
            return rows_of_sparse(grad)
        grad = grad.detach()
        ids = self._touched(self.param.grad)
        if ids is not None:
            return TouchedRows(table=grad.shape[0], ids=ids, values=grad.index_select(0, ids))
        if self._left:
            self._left -= 1
            return TouchedRows(table=grad.shape[0], ids=None, values=grad)
        found = rows_of_dense(grad)
        if 2 * found.count > found.table:
            self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._left = self._pause
        else:
            self._pause = 0
        return found

    def write(self, rows: TouchedRows, *, sparse: bool) -> None:
        """Write rows to a ``sparse`` or dense ``.grad``; they must include all rows returned from :meth:`rows`."""
        grad = self.param.grad
        if sparse:
            self.param.grad = rows.to_sparse()
        elif grad is None or grad.is_sparse:
            self._show(rows)
        elif rows.ids is None:
            grad.detach().copy_(rows.values)
        else:
            grad.detach().index_copy_(0, rows.ids, rows.values)
            self._know(grad, rows.ids)

    def _before(self, grad: torch.Tensor) -> None:
        """Record the rows of a gradient that autograd is about to add to ``.grad``."""
        self._incoming = grad._indices()[0] if grad.is_sparse else None

    @torch.no_grad()
    def _after(self, param: torch.Tensor) -> None:
        """Give ``.grad`` its expected layout after autograd has added to it."""
        incoming, self._incoming = self._incoming, None
        grad = param.grad
        if grad is None:
            return
        if grad.is_sparse != (self._shows == "sparse"):
            if grad.is_sparse:
                self._show(rows_of_sparse(grad))
            else:
                self.param.grad = rows_of_dense(grad).to_sparse()
        elif self._known is not None and incoming is not None:
            before, version, ids = self._known
            if grad is before() and grad._version == version + 1:
                self._know(grad, torch.unique(torch.cat([ids, incoming])))

    def _show(self, rows: TouchedRows) -> None:
        """Set ``.grad`` to rows as a dense gradient, in the previous gradient's memory unless it is in use."""
        own = self._own
        if own is None or _users(own) > 1 or own.shape != self.param.shape or own.device != self.param.device:
            self._own = own = torch.zeros_like(self.param, memory_format=torch.contiguous_format)
        # What is known may be of another gradient, which has the same version by chance. All weak references to one
        # tensor are one object, also when it is gone.
        elif self._known is not None and self._known[0] is self._shown and self._known[1] == own._version:
            own.index_fill_(0, self._known[2], 0)
        else:
            own.zero_()
        if rows.ids is None:
            own.copy_(rows.values)
        else:
            own.index_copy_(0, rows.ids, rows.values)
        grad = own.detach()
        self.param.grad = grad
        self._known, self._shown = None, weakref.ref(grad)
        if rows.ids is not None:
            self._know(grad, rows.ids)

    def _know(self, grad: torch.Tensor, ids: torch.Tensor) -> None:
        self._known = weakref.ref(grad), grad._version, ids

    def _touched(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Return the rows of a dense gradient that may be non-zero; None if they are unknown."""
        if self._known is None or grad is None:
            return None
        known, version, ids = self._known
        return ids if grad is known() and grad._version == version else None


def _users(tensor: torch.Tensor) -> int:
    """Return the number of tensors that use this tensor's memory, including the tensor."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def weak_hook(method: Callable[..., None], *arguments: Any) -> Callable[[Any], None]:
    """Return a hook that calls a bound method without keeping the method's object alive.

    ``arguments`` are passed first. Torch hides references held by ``register_post_accumulate_grad_hook`` hooks from the
    garbage collector. An object that refers to a parameter and has such a hook on it would never be freed, and neither
    would the model, its optimizer and its group's memory.
    """
    reference = weakref.WeakMethod(method)

    def hook(param: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments, param)

    return hook
