"""Interfaces of a bucket, of its operation, and of the group's collectives, as the engine uses them."""

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
    """Gradients of one parameter group, or of rows of one parameter, that statistics are taken of."""

    @property
    def index(self) -> int:
        """Index that tells the gradients from others of the model."""

    @property
    def group(self) -> int:
        """Parameter group."""

    @property
    def sliced(self) -> bool:
        """True if other ranks hold the rest of the mean."""

    def preconditioner(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer's factors for these gradients, for :meth:`squared_norm`; None is the identity."""

    def squared_norm(self, preconditioner: Any) -> torch.Tensor:
        """Return the squared norm of the gradients, each times the preconditioner's element; a scalar tensor."""


GradientBucket: TypeAlias = "Bucket | SlicedBucket | RowBucket"
"""Gradients of some parameters of one group, dtype and device, on their way from ``.grad`` and back to it."""


class BucketOperation(Protocol):
    """Protocol of an operation that sums one bucket's weighted gradients over all ranks, in rounds of collectives.

    :meth:`launch` is called when backward has filled the bucket, :meth:`go_on` after all works of the round before have
    ended, on all buckets in order, until it returns none. What an operation keeps from step to step changes in two
    phases: a step's outcome counts from :meth:`commit` on, and never where :meth:`void` comes first.
    """

    def launch(self, bucket: Any, group: GradientGroup) -> Sequence[Any]:
        """Start the first round; returns its works."""

    def go_on(self, bucket: Any, group: GradientGroup, finished: int) -> Sequence[Any]:
        """Start the round after the first ``finished`` ones; none once the bucket holds the sum."""

    def commit(self) -> None:
        """Commit the step."""

    def void(self) -> None:
        """Discard the pass: the operation's state stays as it was before."""


_FORMS = {"native": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class WireForm:
    """Conversion of a flat buffer into the dtype that travels, and back.

    A value beyond fp16's 65504 becomes infinite, and so does the sum on every rank: AMP's scaler then leaves the step
    out and lowers its scale, as it does where autocast overflows.

    Args:
        dtype: that of ``Wire``: ``"native"``, ``"bf16"`` or ``"fp16"``.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = _FORMS[dtype]
        self._buffer: torch.Tensor | None = None

    def of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the form in which gradients of a dtype travel: never a wider one."""
        return dtype if self._dtype is None or dtype.itemsize <= self._dtype.itemsize else self._dtype

    def pack(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the buffer that travels: `flat` itself if it has the wire's dtype, else this object's own."""
        if self.of(flat.dtype) == flat.dtype:
            return flat
        if self._buffer is None or self._buffer.shape != flat.shape:
            self._buffer = torch.empty_like(flat, dtype=self._dtype)
        return self._buffer.copy_(flat)

    def unpack(self, flat: torch.Tensor) -> None:
        """Copy what has arrived back into `flat`."""
        if self._buffer is not None and self.of(flat.dtype) != flat.dtype:
            flat.copy_(self._buffer)

    def drop(self) -> None:
        """Leave the buffer to a collective that was given up and may still write to it."""
        self._buffer = None
