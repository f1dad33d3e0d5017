"""How parameters are laid out in flat buffers for reduction: equal on every rank, whatever order hooks fire in."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import torch

from elastic_ray.sync.gradient_checks import check_gradients

# As torch DDP: a small first bucket starts the communication early, later ones amortise its latency.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclasses.dataclass(slots=True)
class Bucket:
    """A flat buffer that holds the gradients of some parameters of one group, dtype and device.

    Attributes:
        index: position in the order of reduction.
        group: parameter group that the parameters belong to.
        params: the parameters, in the order of their ``views``.
        flat: the buffer, followed by ``tail`` extra elements.
        body: the buffer without its tail.
        views: one view of ``body`` for each parameter, in its shape.
        complete: whether the pass has reached all parameters, so that none of ``grads`` is None.
        grads: the parameters' ``.grad`` when the buffer was filled.
        carried: sum of the earlier micro-steps' gradients, like ``body``; None before the first accumulation.
        used: which parameters had a gradient in any micro-step of an accumulation.
        written: a parameter, the ``.grad`` that the step's reduction has written to, and its version then.
    """

    index: int
    group: int
    params: list[torch.nn.Parameter]
    flat: torch.Tensor
    body: torch.Tensor
    views: list[torch.Tensor]
    complete: bool = True
    grads: list[torch.Tensor | None] = dataclasses.field(default_factory=list)
    carried: torch.Tensor | None = None
    used: list[bool] = dataclasses.field(default_factory=list)
    written: tuple[torch.nn.Parameter, weakref.ref[torch.Tensor], int] | None = None

    def begin_step(self) -> None:
        """Nothing of an earlier step counts any more."""
        self.used = []
        self.written = None

    def begin_pass(self) -> None:
        """A backward pass begins."""
        self.complete = True

    def mark_incomplete(self) -> None:
        """The backward pass has ended without having reached all parameters."""
        self.complete = False

    def carry(self) -> None:
        """Another micro-step begins: keep what the ones before have left in the buffer."""
        if self.carried is None:
            self.carried = torch.empty_like(self.body)
        self.carried.copy_(self.body)

    def put(self, weight: float) -> None:
        """Weighted gradients into the buffer; zeros where there is none.

        Raises:
            RuntimeError: a gradient is sparse, or was taken away within ``backward()``.
        """
        self.grads = [p.grad for p in self.params]
        try:
            self._put(weight)
        except (RuntimeError, TypeError):
            check_gradients(self.params, self.grads, complete=self.complete)
            raise

    def _put(self, weight: float) -> None:
        """As :meth:`put`, without its explanation of errors."""
        if self.complete:
            torch._foreach_copy_(self.views, cast("list[torch.Tensor]", self.grads))
            if weight != 1.0:
                self.body.mul_(weight)
            return
        for grad, view in zip(self.grads, self.views, strict=True):
            if grad is None:
                view.zero_()
            else:
                torch.mul(grad, weight, out=view)

    def note_used(self) -> None:
        """Remember for the step's later micro-steps which parameters had a gradient."""
        before = self.used or [False] * len(self.params)
        self.used = [used or grad is not None for used, grad in zip(before, self.grads, strict=True)]

    def write_back(self, used: Callable[[], Sequence[bool]]) -> None:
        """The buffer into ``.grad``; ``used`` tells which parameters had a gradient on any rank."""
        if not self.complete:
            for index, flag in enumerate(used()):
                if flag and self.grads[index] is None:  # it had one on other ranks or in earlier micro-steps only
                    self.params[index].grad = torch.empty_like(self.params[index])
            self.grads = [p.grad for p in self.params]
        pairs = [(grad, view) for grad, view in zip(self.grads, self.views, strict=True) if grad is not None]
        if pairs:
            grads, views = zip(*pairs, strict=True)
            torch._foreach_copy_(grads, views)
            param = next(p for p, grad in zip(self.params, self.grads, strict=True) if grad is not None)
            self.written = param, weakref.ref(grads[0]), grads[0]._version
        self.grads = []  # else it would outlive zero_grad()

    @property
    def goes_on(self) -> bool:
        """Whether ``.grad`` still holds what was reduced: this backward pass has added to it, nobody zeroed it.

        ``zero_grad`` drops the tensor, or counts as one more change of it than the pass's own.
        """
        if self.written is None:
            return False
        param, grad, version = self.written
        return param.grad is not None and param.grad is grad() and param.grad._version <= version + 1

    def replace_buffer(self) -> None:
        """Leave the buffer to a reduction that was given up and may still write to it."""
        self.flat = self.flat.clone()
        self.body, self.views = _cut_views(self.flat, self.params)


def build_buckets(groups: Sequence[Sequence[torch.nn.Parameter]], tail: int) -> tuple[list[Bucket], torch.Tensor]:
    """Buckets in the order in which backward fills them (last parameters first), and the tail tensor.

    The tail carries control values with the last bucket's reduction where that is in float32 or float64; else it is a
    buffer of its own, to be reduced by itself.

    Args:
        groups: parameters of each parameter group, in the model's order.
        tail: number of control values.
    """
    order = [(index, p) for index, group in enumerate(groups) for p in group]
    cuts: list[tuple[int, list[torch.nn.Parameter]]] = []
    for kind in dict.fromkeys((index, p.dtype, p.device) for index, p in order):
        params = [p for index, p in reversed(order) if (index, p.dtype, p.device) == kind]
        cuts += [(kind[0], cut) for cut in _cut(params, first=not cuts)]
    if not cuts:
        raise ValueError("model must have at least one parameter that requires a gradient")
    buckets = []
    carries_tail = cuts[-1][1][0].dtype in (torch.float32, torch.float64)
    for index, (group, params) in enumerate(cuts):
        extra = tail if carries_tail and index == len(cuts) - 1 else 0
        buckets.append(_allocate(index, group, params, extra))
    last = buckets[-1]
    values = last.flat[last.body.numel() :] if carries_tail else torch.zeros(tail, device=last.flat.device)
    return buckets, values


def _cut(params: list[torch.nn.Parameter], *, first: bool) -> list[list[torch.nn.Parameter]]:
    """Parameters of one kind, bucket by bucket."""
    cuts: list[list[torch.nn.Parameter]] = [[]]
    size, limit = 0, FIRST_BUCKET_BYTES if first else BUCKET_BYTES
    for p in params:
        nbytes = p.numel() * p.element_size()
        if cuts[-1] and size + nbytes > limit:
            cuts.append([])
            size, limit = 0, BUCKET_BYTES
        cuts[-1].append(p)
        size += nbytes
    return cuts


def _allocate(index: int, group: int, params: list[torch.nn.Parameter], extra: int) -> Bucket:
    numel = sum(p.numel() for p in params)
    flat = torch.zeros(numel + extra, dtype=params[0].dtype, device=params[0].device)
    body, views = _cut_views(flat, params)
    return Bucket(index=index, group=group, params=params, flat=flat, body=body, views=views)


def _cut_views(flat: torch.Tensor, params: Sequence[torch.nn.Parameter]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    sizes = [p.numel() for p in params]
    body = flat[: sum(sizes)]
    return body, [piece.view(p.shape) for piece, p in zip(torch.split(body, sizes), params, strict=True)]


def whole_is_finite(buckets: Sequence[Bucket]) -> bool:
    """Whether all gradients in the buckets are finite, by one sum over each."""
    if len(buckets) == 1:
        total = float(buckets[0].body.sum())
    else:
        total = float(torch.stack([bucket.body.sum().to(torch.float32) for bucket in buckets]).sum())
    # A sum may overflow where no gradient has.
    return math.isfinite(total) or all(bool(bucket.body.isfinite().all()) for bucket in buckets)


def own_is_finite(buckets: Sequence[Bucket]) -> bool:
    """Whether this rank's own gradients, those of earlier micro-steps included, are finite."""
    tensors = [grad for bucket in buckets for grad in bucket.grads if grad is not None]
    tensors += [bucket.carried for bucket in buckets if bucket.carried is not None]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
