"""What the engine asks of a bucket, of what is done with it, and of the group in which that happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class GradientCollectives(Protocol):
    """Collectives of the present group among gradients. All start an operation, and return its work to be waited for.

    The order in which they are started must be the same on all ranks.
    """

    @property
    def rank(self) -> int:
        """Of this worker."""

    @property
    def world_size(self) -> int:
        """Ranks."""

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """The sum over all ranks, in place."""

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Every rank's ``tensor`` (of one size) into ``output``, one after the other in rank order."""

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
    ) -> Any:
        """Piece ``i`` of ``tensor`` to rank ``i``; what comes lies in ``output`` in rank order.

        Without splits all pieces are equal; splits count along the first dimension.
        """

    def reduce(self, tensor: torch.Tensor, root: int) -> Any:
        """The sum over all ranks, in place on ``root``; elsewhere the tensor may be overwritten."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Rank ``root``'s tensor, in place."""


class MeasuredGradient(Protocol):
    """Gradients of one parameter group, or of rows of one parameter, that statistics are taken of."""

    @property
    def index(self) -> int:
        """Tells it from others of the model."""

    @property
    def group(self) -> int:
        """Parameter group."""

    @property
    def sliced(self) -> bool:
        """Whether other ranks have the rest of the mean."""

    def preconditioner(self, optimizer: torch.optim.Optimizer) -> Any:
        """What the optimizer multiplies these gradients with, for :meth:`squared_norm`; None is the identity."""

    def squared_norm(self, preconditioner: Any) -> torch.Tensor:
        """Of what it holds, each element times the preconditioner's; a scalar tensor."""


class GradientBucket(MeasuredGradient, Protocol):
    """Gradients of some parameters of one group, dtype and device, on their way from ``.grad`` and back to it."""

    @property
    def index(self) -> int:
        """Position in the order of reduction."""

    @property
    def group(self) -> int:
        """Parameter group of its parameters."""

    @property
    def params(self) -> Sequence[torch.nn.Parameter]:
        """Its parameters."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradients."""

    @property
    def sliced(self) -> bool:
        """Whether each rank receives the mean of some parts only."""

    @property
    def complete(self) -> bool:
        """Whether the backward pass has reached all its parameters."""

    @property
    def used(self) -> Sequence[bool]:
        """Which parameters had a gradient in any micro-step of an accumulation."""

    @property
    def has_gradient(self) -> Sequence[bool]:
        """Which parameters had a gradient on this rank when it was filled."""

    @property
    def goes_on(self) -> bool:
        """Whether ``.grad`` still holds what was reduced: this pass has added to it, and nothing has zeroed it."""

    def begin_step(self, *, carries: bool) -> None:
        """Nothing of an earlier step counts any more; if it ``carries``, memory for :meth:`carry` may stay."""

    def begin_pass(self) -> None:
        """A backward pass begins."""

    def begin_filling(self, *, alone: bool) -> float:
        """The pass is put into the bucket; ``alone`` if it holds nothing of other micro-steps, and is reduced.

        Returns:
            Elements of gradients that may wait for :meth:`adopt`.
        """

    def adopt(self, places: Sequence[int]) -> None:
        """The pass has given the parameters at these places their gradients, of more elements than may wait."""

    def add_again(self, param: torch.Tensor) -> None:
        """The pass adds to a parameter's gradient once more, by a backward pass within it."""

    def mark_incomplete(self) -> None:
        """The backward pass has ended without having reached all parameters."""

    def carry(self) -> None:
        """Another micro-step begins: keep what the ones before have left."""

    def share(self, factor: float) -> Any:
        """What it holds times ``factor``, for :meth:`add`."""

    def carried_share(self, factor: float = 1.0) -> Any:
        """What :meth:`carry` has kept times ``factor``, for :meth:`add`."""

    def put(self, weight: float) -> None:
        """Take the gradients in, times ``weight``; zeros where there is none.

        Raises:
            RuntimeError: a gradient cannot be taken in; the message says why.
        """

    def check(self) -> None:
        """Raise RuntimeError where :meth:`put` would."""

    def release(self) -> None:
        """Give memory back until it is needed."""

    def flat_gradient(self) -> torch.Tensor:
        """What it holds as one vector."""

    def add(self, share: Any) -> None:
        """Add a share to what it holds."""

    def add_vector(self, vector: torch.Tensor) -> None:
        """Add a vector, as :meth:`flat_gradient` gives one, to what it holds."""

    def note_used(self) -> None:
        """Remember for the step's later micro-steps which parameters had a gradient."""

    def preconditioner(self, optimizer: torch.optim.Optimizer) -> Any:
        """What the optimizer multiplies these gradients with, for :meth:`squared_norm`; None is the identity."""

    def squared_norm(self, preconditioner: Any) -> torch.Tensor:
        """Of what it holds, each element times the preconditioner's; a scalar tensor."""

    def total(self) -> torch.Tensor:
        """The sum of all that it holds, a scalar float32 tensor: not finite where an element is not."""

    def is_finite(self) -> bool:
        """Whether all that it holds is finite."""

    def sum_up(self) -> torch.Tensor | None:
        """Remember the sum of what this rank has put in, where the reduction takes its place.

        Returns:
            A scalar tensor, not finite where an element is not; None where gradients are in memory of their own.
        """

    @property
    def is_summed_up(self) -> bool:
        """Whether :meth:`sum_up` has told whether what this rank has put in is finite."""

    def own_is_finite(self) -> bool:
        """Whether this rank's own gradients, those of earlier micro-steps included, are finite."""

    def write_back(self, used: Callable[[], Sequence[bool]]) -> None:
        """What it holds into ``.grad``; ``used`` tells which parameters had a gradient on any rank."""

    def replace_buffer(self) -> None:
        """Leave its memory to a reduction that was given up and may still write to it."""


class BucketOperation(Protocol):
    """How the weighted gradients of one bucket become their sum on all ranks: in rounds of collectives.

    :meth:`launch` is called when backward has filled the bucket, :meth:`go_on` after all works of the round before have
    ended, on all buckets in order, until it returns none. What an operation keeps from step to step changes in two
    phases: a step's outcome counts from :meth:`commit` on, and never where :meth:`void` comes first.
    """

    def launch(self, bucket: Any, group: GradientCollectives) -> Sequence[Any]:
        """Start the first round; returns its works."""

    def go_on(self, bucket: Any, group: GradientCollectives, finished: int) -> Sequence[Any]:
        """Start the round after the first ``finished`` ones; none once the bucket holds the sum."""

    def commit(self) -> None:
        """The step counts."""

    def void(self) -> None:
        """It does not: what the operation keeps is as before."""


_FORMS = {"native": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class WireForm:
    """Turns a flat buffer into what travels, and back.

    A value beyond fp16's 65504 becomes infinite, and so does the sum on every rank: AMP's scaler then leaves the step
    out and lowers its scale, as it does where autocast overflows.

    Args:
        dtype: that of ``Wire``: ``"native"``, ``"bf16"`` or ``"fp16"``.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = _FORMS[dtype]
        self._buffer: torch.Tensor | None = None

    def of(self, dtype: torch.dtype) -> torch.dtype:
        """The form in which gradients of a dtype travel: never a wider one."""
        return dtype if self._dtype is None or dtype.itemsize <= self._dtype.itemsize else self._dtype

    def pack(self, flat: torch.Tensor) -> torch.Tensor:
        """What travels: the buffer itself where its form is right, else one of this object's."""
        if self.of(flat.dtype) == flat.dtype:
            return flat
        if self._buffer is None or self._buffer.shape != flat.shape:
            self._buffer = torch.empty_like(flat, dtype=self._dtype)
        return self._buffer.copy_(flat)

    def unpack(self, flat: torch.Tensor) -> None:
        """What has arrived, back into the buffer."""
        if self._buffer is not None and self.of(flat.dtype) != flat.dtype:
            flat.copy_(self._buffer)

    def drop(self) -> None:
        """Leave the buffer to a collective that was given up and may still write to it."""
        self._buffer = None
