"""Interfaces of buckets and their operations, as used by the gradient engine."""

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
    """Protocol for gradients with measured statistics: one parameter group's gradients, or rows of a parameter."""

    @property
    def index(self) -> int:
        """Index that identifies these gradients (a bucket or rows) within the model."""

    @property
    def group(self) -> int:
        """Index of the optimizer's parameter group that the gradients belong to."""

    @property
    def sliced(self) -> bool:
        """True if this rank holds only part of the mean and other ranks hold the rest."""

    def preconditioner(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the factors that the optimizer multiplies these gradients by; None if they are 1."""

    def squared_norm(self, preconditioner: Any) -> torch.Tensor:
        """Return the gradients' squared norm after multiplication by the preconditioner, as a scalar tensor."""


GradientBucket: TypeAlias = "Bucket | SlicedBucket | RowBucket"
"""Gradients of some parameters of one group, dtype and device, on their way from ``.grad`` and back to it."""


class BucketOperation(Protocol):
    """Protocol for operations that sum a bucket's weighted gradients over all ranks, in rounds of collectives.

    :meth:`launch` is called when backward has filled the bucket. Once all work in a round is done, :meth:`next_round`
    is called for all buckets in order, until it returns no work objects. State kept by an operation between steps
    changes in two phases: :meth:`commit` makes the outcome of a step final, and :meth:`void` discards it.
    """

    def launch(self, bucket: Any, group: GradientGroup) -> Sequence[Any]:
        """Start the first round of collectives and return their work objects (handles to wait on)."""

    def next_round(self, bucket: Any, group: GradientGroup, finished: int) -> Sequence[Any]:
        """Start the next round after ``finished`` rounds and return its work objects; none once the sum is complete."""
        return ()

    def commit(self) -> None:
        """Make the step's changes to the operation's state (such as residuals) final."""
        return

    def void(self) -> None:
        """Discard the current step's passes, and restore the operation's state to what it was before the step."""
        return


_FORMS = {"native": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class WireForm:
    """Conversion of a flat buffer to the dtype used for sending, and back.

    With fp16, a value above 65504 becomes infinite, which makes the sum infinite on every rank. AMP's scaler then skips
    the step and lowers its scale, as for an overflow under autocast.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = _FORMS[dtype]
        self._buffer: torch.Tensor | None = None

    def of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype used to send gradients of the given dtype; it is never wider."""
        return dtype if self._dtype is None or dtype.itemsize <= self._dtype.itemsize else self._dtype

    def pack(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the buffer to send: `flat` itself if it already has the right dtype, otherwise an internal buffer."""
        if self.of(flat.dtype) == flat.dtype:
            return flat
        if self._buffer is None or self._buffer.shape != flat.shape:
            self._buffer = torch.empty_like(flat, dtype=self._dtype)
        return self._buffer.copy_(flat)

    def unpack(self, flat: torch.Tensor) -> None:
        """Copy the values received in the buffer from :meth:`pack` back into ``flat``."""
        if self._buffer is not None and self.of(flat.dtype) != flat.dtype:
            flat.copy_(self._buffer)

    def drop(self) -> None:
        """Drop the internal buffer, because an abandoned collective may still be writing to it."""
        self._buffer = None
