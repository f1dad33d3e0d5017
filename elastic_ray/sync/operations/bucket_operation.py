"""Interfaces of buckets and their operations, as the gradient engine uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import GradientGroup
    from elastic_ray.sync.operations.buckets import Bucket
    from elastic_ray.sync.sliced_gradients.operation import SlicedBucket
    from elastic_ray.sync.tables.row_bucket import RowBucket


class MeasuredGradient(Protocol):
    """Gradients for which statistics are measured: those of one parameter group, or rows of one parameter."""

    @property
    def index(self) -> int:
        """Index that identifies the gradients within the model."""

    @property
    def group(self) -> int:
        """Index of the parameter group."""

    @property
    def sliced(self) -> bool:
        """True if this rank holds only a part of the mean and other ranks hold the rest."""

    def preconditioner(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer's factors for these gradients, for :meth:`squared_norm`; None is the identity."""

    def squared_norm(self, preconditioner: Any) -> torch.Tensor:
        """Return the squared norm of the gradients times the preconditioner, element by element; a scalar tensor."""


GradientBucket: TypeAlias = "Bucket | SlicedBucket | RowBucket"
"""Gradients of some parameters of one group, dtype and device, on their way from ``.grad`` and back to it."""


class BucketOperation(Protocol):
    """Protocol of an operation that sums one bucket's weighted gradients over all ranks, in rounds of collectives.

    :meth:`launch` is called when backward has filled the bucket. :meth:`go_on` is called, for all buckets in
    order, after all works of the previous round have ended, until it returns no works. State that an operation
    keeps between steps changes in two phases: :meth:`commit` makes a step's outcome final, and :meth:`void`
    discards it.
    """

    def launch(self, bucket: Any, group: GradientGroup) -> Sequence[Any]:
        """Start the first round and return its works."""

    def go_on(self, bucket: Any, group: GradientGroup, finished: int) -> Sequence[Any]:
        """Start the round after ``finished`` rounds and return its works; none once the bucket holds the sum."""

    def commit(self) -> None:
        """Commit the step."""

    def void(self) -> None:
        """Discard the pass; the operation's state from before the pass is kept."""


_FORMS = {"native": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class WireForm:
    """Conversion of a flat buffer to the dtype in which it is sent, and back.

    A value beyond fp16's maximum of 65504 becomes infinite, and so does the sum on every rank. AMP's scaler then
    skips the step and lowers its scale, as it does for an overflow under autocast.

    Args:
        dtype: Value of ``Wire.dtype``: ``"native"``, ``"bf16"`` or ``"fp16"``.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = _FORMS[dtype]
        self._buffer: torch.Tensor | None = None

    def of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a dtype are sent, which is never wider."""
        return dtype if self._dtype is None or dtype.itemsize <= self._dtype.itemsize else self._dtype

    def pack(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the buffer to send: `flat` itself if it has the wire's dtype, else an internal buffer."""
        if self.of(flat.dtype) == flat.dtype:
            return flat
        if self._buffer is None or self._buffer.shape != flat.shape:
            self._buffer = torch.empty_like(flat, dtype=self._dtype)
        return self._buffer.copy_(flat)

    def unpack(self, flat: torch.Tensor) -> None:
        """Copy the received values back into `flat`."""
        if self._buffer is not None and self.of(flat.dtype) != flat.dtype:
            flat.copy_(self._buffer)

    def drop(self) -> None:
        """Drop the buffer, because an abandoned collective may still write to it."""
        self._buffer = None
