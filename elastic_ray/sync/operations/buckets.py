"""Flat buffers for reducing gradients, laid out identically on all ranks regardless of the order of hook calls."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.sync.device_numbers import real_count, shaped_like
from elastic_ray.sync.operations.bucket_operation import BucketOperation
from elastic_ray.sync.operations.gradient_checks import check_gradients
from elastic_ray.sync.preconditioners import FlatPreconditioner, preconditioner, squared_norm

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import GradientGroup


_LARGE = 1 << 14
"""Elements of a tensor from which a pass over memory takes longer than a call."""
_gradient = operator.attrgetter("grad")


class Bucket:
    """Flat buffer for the gradients of parameters that share a parameter group, dtype and device.

    Complex numbers are stored as two real numbers. With ``shows``, ``.grad`` becomes a view of the buffer when a pass
    fills it, so that gradients are in memory only once. A gradient that user code has assigned or still references
    remains a separate tensor, and the sum is copied into it. Memory is allocated on first use and kept until
    :meth:`release`; a lone rank needs none.

    Args:
        shows: Whether ``.grad`` may be a view of the buffer, because only a plain all-reduce uses the buffer.

    Attributes:
        complete: Whether the backward pass has reached all parameters, so that each one has a gradient.
        is_summed_up: Whether :meth:`put` has computed the sum that shows whether this rank's gradients are finite.
        has_gradient: For each parameter, whether it had a gradient on this rank when the buffer was filled.
        grads: Gradients in separate memory that the sum is copied into; None for parameters without such a gradient.
        carried: Sum of the earlier micro-steps' gradients, in the layout of ``body``; None before the first
            accumulation.
        used: For each parameter, whether it had a gradient in any micro-step of an accumulation.
        written: A parameter, the ``.grad`` written by the step's reduction, and its version at that time.
        additions: Number of times the pass adds to that ``.grad``.
        counted_elsewhere: Ranges of elements excluded from statistics.
    """

    sliced = False  # each rank receives the whole mean

    def __init__(
        self, index: int, group: int, params: Sequence[torch.nn.Parameter], tail: int = 0, *, shows: bool = False
    ) -> None:
        self.index, self.group, self.params = index, group, list(params)
        self.dtype = params[0].dtype.to_real()
        self.size, self._tail = sum(real_count(p) for p in params), tail
        # A view has the strides of a contiguous tensor, which those of a parameter in another memory format are not.
        self._may_show, self._shows = shows and all(p.is_contiguous() for p in params), False
        self._there: list[bool] = []  # which parameters had a gradient when the pass began
        self._sum: torch.Tensor | None = None  # of what this rank has put in
        self.complete, self.is_summed_up = True, False
        self.has_gradient: Sequence[bool] = []
        self.grads: list[torch.Tensor | None] = []
        self.carried: torch.Tensor | None = None
        self.used: list[bool] = []
        self.written: tuple[torch.nn.Parameter, weakref.ref[torch.Tensor], int] | None = None
        self.additions = 1
        self.counted_elsewhere: list[tuple[int, int]] = []

    @property
    def flat(self) -> torch.Tensor:
        """Flat buffer including its tail."""
        return self.memory.flat

    @property
    def body(self) -> torch.Tensor:
        """Flat buffer without its tail."""
        return self.memory.body

    @functools.cached_property
    def memory(self) -> BucketMemory:
        """Buffer and its views, allocated on first use."""
        flat = torch.zeros(self.size + self._tail, dtype=self.dtype, device=self.params[0].device)
        return BucketMemory(flat, self.size, self.params)

    def release(self) -> None:
        """Free the memory until it is needed again."""
        self.__dict__.pop("memory", None)
        self.carried = None
        self.grads, self._there = [], []

    def start_pass(self, *, first: bool, reduces: bool, accumulates: bool) -> float:
        """Start a backward pass; return the number of gradient elements that may stay in separate memory.

        Args:
            first: Whether the pass is the first in its step; state from earlier steps is then discarded.
            reduces: Whether the pass ends in a reduction.
            accumulates: Whether the pass's gradients are added to other micro-steps' gradients.
        """
        self.complete, self.is_summed_up, self.additions, self._sum = True, False, 1, None
        if first:
            self.used, self.written = [], None
            self.grads = []  # of one rank alone nothing was written back
            if not accumulates:
                self.carried = None
        self._shows = reduces and not accumulates and self._may_show
        if not self._shows:
            if reduces or accumulates:
                self._remove_from()
            return math.inf
        memory: BucketMemory | None = self.__dict__.get("memory")
        if memory is not None and torch._C._storage_Use_Count(memory.storage) > memory.users:
            self.replace_buffer()  # user code holds a gradient still, or a view of one: the memory is its own from now
        self._there = list(map(operator.is_not, map(_gradient, self.params), itertools.repeat(None)))
        return max(self.size >> 5, _LARGE)

    def _remove_from(self) -> None:
        """Move gradients out of the buffer into separate memory."""
        if "memory" not in self.__dict__ or not self._may_show:
            return
        for param, view in zip(self.params, self.memory.views, strict=True):
            if param.grad is view:
                param.grad = view.clone()

    def adopt(self, places: Sequence[int]) -> None:
        """Move new gradients for the parameters at these positions into the buffer, so that few are stored twice."""
        taken = [place for place in places if not self._there[place]]
        params = [self.params[each] for each in taken]
        grads = [param.grad for param in params]
        if not taken or any(grad is None or grad.requires_grad or grad.layout != torch.strided for grad in grads):
            return
        there: Any = grads  # all are
        views = [self.memory.views[each] for each in taken]
        with torch.no_grad():
            torch._foreach_copy_(views, there)
        for each, param, view in zip(taken, params, views, strict=True):
            if self.written is not None and self.written[0] is param:
                self.written = None  # what was reduced before was zeroed
            param.grad = view
            self._there[each] = True

    def add_again(self, param: torch.Tensor) -> None:
        """Record that a nested backward pass adds to a gradient again."""
        if self.written is not None and self.written[0] is param:
            self.additions += 1

    def mark_incomplete(self) -> None:
        """Record that the backward pass ended without reaching all parameters."""
        self.complete = False

    def carry(self) -> None:
        """Copy the gradients from the buffer to ``carried``, freeing the buffer for another micro-step."""
        if self.carried is None:
            self.carried = torch.empty_like(self.body)
        self.carried.copy_(self.body)

    def share(self, factor: float) -> torch.Tensor:
        """Return a copy of the gradients multiplied by ``factor``, for adding to the buffer with :meth:`add`."""
        return self.body * factor

    def carried_share(self, factor: float = 1.0) -> torch.Tensor | None:
        """Return the gradients kept by :meth:`carry`, multiplied by ``factor``; None if none were kept."""
        return self.carried if self.carried is None or factor == 1.0 else self.carried * factor

    def flat_gradient(self) -> torch.Tensor:
        """Return the gradients in the buffer as one vector."""
        return self.body

    def add(self, share: torch.Tensor) -> None:
        """Add the result of :meth:`share` or :meth:`carried_share` to the buffer."""
        self.body.add_(share)

    def add_vector(self, vector: torch.Tensor) -> None:
        """Add a flat vector with the same layout as the buffer to the buffer."""
        self.body.add_(vector)

    def preconditioner(self, optimizer: torch.optim.Optimizer) -> FlatPreconditioner | None:
        """Return the factors that the optimizer multiplies the bucket's gradients by; None if they are 1."""
        return preconditioner(optimizer, [getattr(p, "whole", p) for p in self.params])

    def squared_norm(self, preconditioner: FlatPreconditioner | None) -> torch.Tensor:
        """Return the buffer's squared norm after multiplication by the preconditioner."""
        body = self.memory.body
        whole = preconditioner is None and self.dtype is torch.float32
        found = torch.dot(body, body) if whole else squared_norm(body, preconditioner)
        for start, stop in self.counted_elsewhere:
            part = body[start:stop]
            found -= squared_norm(part) if preconditioner is None else preconditioner.squared_norm(part, start)
        return found

    def count_elsewhere(self, params: Collection[int]) -> None:
        """Exclude parameters (given by ``id``) from :meth:`squared_norm`, because they count on another worker."""
        stops = list(itertools.accumulate(real_count(p) for p in self.params))
        starts = [0, *stops]
        self.counted_elsewhere = [
            (start, stop)
            for start, stop, p in zip(starts, stops, self.params, strict=False)
            if id(getattr(p, "whole", p)) in params
        ]

    def total(self) -> torch.Tensor:
        """Return the sum of all elements, in float32."""
        return self.body.sum(dtype=torch.float32)

    def is_finite(self) -> bool:
        """True if all elements of the buffer are finite."""
        return bool(self.body.isfinite().all())

    def own_is_finite(self) -> bool:
        """True if this rank's gradients are finite, including gradients from earlier micro-steps."""
        if self._sum is not None:
            return math.isfinite(self._sum)
        tensors = [grad for grad in self.grads if grad is not None]
        if self.carried is not None:
            tensors.append(self.carried)
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def put(self, weight: float, *, sums: bool = False) -> torch.Tensor | None:
        """Copy this rank's gradients into the buffer, multiplied by ``weight``.

        Parameters without a gradient get zeros.

        Args:
            sums: Whether to compute the sum of this rank's gradients, if the reduction will overwrite them.

        Returns the sum as a scalar tensor, or None if it was not computed; it is not finite if any element is not.

        Raises RuntimeError if a gradient is sparse, or was removed within ``backward()``.
        """
        body, views = self.memory.body, self.memory.views
        self.grads = grads = list(map(_gradient, self.params))
        whole: Any = grads  # where the pass has reached all
        self.has_gradient = [True] * len(grads) if self.complete else [grad is not None for grad in grads]
        try:
            if not weight:  # a mean over nothing is no number
                body.zero_()
            elif self.complete and (weight == 1.0 or self.size < _LARGE * len(grads)):
                if True not in self._there:
                    torch._foreach_copy_(views, whole)
                elif True in (apart := list(map(operator.is_not, grads, views))):  # the rest is where it is to be
                    torch._foreach_copy_(list(itertools.compress(views, apart)), list(itertools.compress(whole, apart)))
                if weight != 1.0:
                    body.mul_(weight)
            else:
                for grad, view in zip(grads, views, strict=True):
                    if grad is None:
                        view.zero_()
                    else:
                        torch.mul(grad, weight, out=view)
        except (RuntimeError, TypeError):
            check_gradients(self.params, grads, complete=self.complete)
            raise
        if not self._shows:
            return None
        for index, (param, view, there) in enumerate(zip(self.params, views, self._there, strict=True)):
            grad, grads[index] = grads[index], None
            if grad is None or grad is view:
                continue
            if grad.requires_grad or (there and any(map(operator.gt, _uses(grad), _uses_of_free_gradients()))):
                grads[index] = grad  # somebody holds it
            else:
                param.grad = view
        self._there = []
        if sums:
            self._sum, self.is_summed_up = body.sum(dtype=torch.float32), True
        return self._sum

    def check(self) -> None:
        """Raise the RuntimeError that :meth:`put` would raise, if any."""
        check_gradients(self.params, [p.grad for p in self.params], complete=self.complete)

    def record_used(self) -> None:
        """Record which parameters had a gradient, for later micro-steps in the same step."""
        before = self.used or [False] * len(self.params)
        self.used = [used or had for used, had in zip(before, self.has_gradient, strict=True)]

    def write_back(self, used: Callable[[], Sequence[bool]]) -> None:
        """Copy the buffer into ``.grad``; ``used`` returns which parameters had a gradient on any rank."""
        if not self.complete:
            for index, flag in enumerate(used()):
                if flag and not self.has_gradient[index]:  # it had one on other ranks or in earlier micro-steps only
                    param = self.params[index]
                    if self._shows:
                        param.grad = self.memory.views[index]
                    elif param.grad is None:
                        self.grads[index] = param.grad = torch.empty_like(param)
        own = list(map(operator.is_not, self.grads, itertools.repeat(None)))
        if True in own:
            grads: Any = list(itertools.compress(self.grads, own))
            torch._foreach_copy_(grads, list(itertools.compress(self.memory.views, own)))
        self.written = None
        for param in self.params:
            if param.grad is not None:
                self.written = param, weakref.ref(param.grad), param.grad._version
                break
        self.grads = []  # else it would outlive zero_grad()

    @property
    def goes_on(self) -> bool:
        """True if this pass has added to gradients already reduced by an earlier pass, without zeroing in between.

        This can be detected because ``zero_grad`` either drops the tensor or increases its version number by more than
        the pass does.
        """
        if self.written is None:
            return False
        param, grad, version = self.written
        return param.grad is not None and param.grad is grad() and param.grad._version <= version + self.additions

    def replace_buffer(self) -> None:
        """Allocate a new buffer, because an abandoned reduction or user code may still be using the old one."""
        before: BucketMemory | None = self.__dict__.get("memory")
        if before is None:
            return
        self.memory = BucketMemory(before.flat.clone(), self.size, self.params)
        if self._may_show:
            for param, view, new in zip(self.params, before.views, self.memory.views, strict=True):
                if param.grad is view:
                    param.grad = new


class BucketMemory:
    """Flat buffer of a bucket, with a view into it for each parameter.

    Attributes:
        views: One view per parameter, each with its own version counter.
        storage, users: Storage of the buffer, and its reference count when user code does not reference it.
    """

    def __init__(self, flat: torch.Tensor, size: int, params: Sequence[torch.nn.Parameter]) -> None:
        self.flat, self.body, self.tail = flat, flat[:size], flat[size:]
        self.tail_numbers: Any = self.tail.numpy() if flat.device.type == "cpu" and len(self.tail) else None
        pieces = torch.split(self.body, [real_count(p) for p in params])
        self.views = [shaped_like(piece, p).data for piece, p in zip(pieces, params, strict=True)]
        del pieces
        self.storage = flat.untyped_storage()._cdata
        self.users = torch._C._storage_Use_Count(self.storage)


def _uses(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the reference counts of a tensor and its storage."""
    return sys.getrefcount(tensor), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _uses_of_free_gradients() -> tuple[int, int]:
    """Return the reference counts of a gradient held only by ``.grad`` and one variable."""
    param = torch.nn.Parameter(torch.zeros(1))
    with torch.enable_grad():
        (param * 1.0).sum().backward()  # type: ignore[no-untyped-call]
    grad = param.grad
    assert grad is not None, "it has got one"
    return _uses(grad)


class AllReduceOperation(BucketOperation):
    """All-reduce of a flat bucket and the control values in its tail; a stateless ``BucketOperation``."""

    def launch(self, bucket: Bucket, group: GradientGroup) -> Sequence[Any]:
        """Launch the all-reduce of the entire buffer, including its tail."""
        return (group.all_reduce(bucket.flat),)
