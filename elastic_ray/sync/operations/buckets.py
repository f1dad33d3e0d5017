"""How parameters are laid out in flat buffers for reduction: equal on every rank, whatever order hooks fire in."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_ray.batch.device_numbers import real_count, shaped_like
from elastic_ray.batch.statistics import preconditioner, squared_norm
from elastic_ray.sync.operations.bucket_operation import GradientCollectives
from elastic_ray.sync.operations.gradient_checks import check_gradients

_LARGE = 1 << 14
"""Elements of a tensor from which a pass over memory takes longer than a call."""


class Bucket:
    """A flat buffer that holds the gradients of some parameters of one group, dtype and device, in real numbers.

    Its memory is there from the first use on, until :meth:`release`: one rank alone needs none.

    Args:
        index: position in the order of reduction.
        group: parameter group that the parameters belong to.
        params: the parameters, in the order of their ``views``.
        tail: extra elements behind them.

    Attributes:
        index, group, params: as given.
        size: elements of the parameters.
        dtype: of the gradients.
        complete: whether the pass has reached all parameters, so that none of ``grads`` is None.
        grads: the parameters' ``.grad`` when the buffer was filled.
        carried: sum of the earlier micro-steps' gradients, like ``body``; None before the first accumulation.
        used: which parameters had a gradient in any micro-step of an accumulation.
        written: a parameter, the ``.grad`` that the step's reduction has written to, and its version then.
        additions: how often the pass adds to that ``.grad``.
    """

    sliced = False  # each rank receives the whole mean

    def __init__(self, index: int, group: int, params: Sequence[torch.nn.Parameter], tail: int = 0) -> None:
        self.index, self.group, self.params = index, group, list(params)
        self.dtype = params[0].dtype.to_real()
        self.size, self._tail = sum(real_count(p) for p in params), tail
        self._memory: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]] | None = None
        self.complete = True
        self.grads: list[torch.Tensor | None] = []
        self.carried: torch.Tensor | None = None
        self.used: list[bool] = []
        self.written: tuple[torch.nn.Parameter, weakref.ref[torch.Tensor], int] | None = None
        self.additions = 1

    @property
    def flat(self) -> torch.Tensor:
        """The buffer, with what follows the parameters."""
        return self._held()[0]

    @property
    def body(self) -> torch.Tensor:
        """The buffer without that."""
        return self._held()[1]

    @property
    def views(self) -> list[torch.Tensor]:
        """One view of ``body`` for each parameter, in its shape."""
        return self._held()[2]

    def _held(self) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        if self._memory is None:
            self._hold(torch.zeros(self.size + self._tail, dtype=self.dtype, device=self.params[0].device))
            assert self._memory is not None, "it was made"
        return self._memory

    def _hold(self, flat: torch.Tensor) -> None:
        body = flat[: self.size]
        pieces = torch.split(body, [real_count(p) for p in self.params])
        views = [shaped_like(piece, p) for piece, p in zip(pieces, self.params, strict=True)]
        self._memory = flat, body, views

    def release(self) -> None:
        """Give the memory back until it is needed."""
        self._memory = self.carried = None
        self.grads = []

    def begin_step(self) -> None:
        """Nothing of an earlier step counts any more."""
        self.used = []
        self.grads = []  # of one rank alone nothing was written back
        self.written = None

    def begin_pass(self) -> None:
        """A backward pass begins."""
        self.complete, self.additions = True, 1

    def add_again(self, param: torch.Tensor) -> None:
        """The pass adds to a gradient once more, by a backward pass within it."""
        if self.written is not None and self.written[0] is param:
            self.additions += 1

    def mark_incomplete(self) -> None:
        """The backward pass has ended without having reached all parameters."""
        self.complete = False

    def carry(self) -> None:
        """Another micro-step begins: keep what the ones before have left in the buffer."""
        if self.carried is None:
            self.carried = torch.empty_like(self.body)
        self.carried.copy_(self.body)

    def drop_carried(self) -> None:
        """What :meth:`carry` has kept is not needed any more."""
        self.carried = None

    @property
    def has_gradient(self) -> Sequence[bool]:
        """Which parameters had a gradient on this rank when the buffer was filled."""
        return [grad is not None for grad in self.grads]

    def share(self, factor: float) -> torch.Tensor:
        """What it holds times ``factor``, for :meth:`add`."""
        return self.body * factor

    def carried_share(self, factor: float = 1.0) -> torch.Tensor | None:
        """What :meth:`carry` has kept times ``factor``, for :meth:`add`."""
        return self.carried if self.carried is None or factor == 1.0 else self.carried * factor

    def flat_gradient(self) -> torch.Tensor:
        """What it holds as one vector."""
        return self.body

    def add(self, share: torch.Tensor) -> None:
        """Add a share to what it holds."""
        self.body.add_(share)

    def add_vector(self, vector: torch.Tensor) -> None:
        """As :meth:`add`."""
        self.body.add_(vector)

    def preconditioner(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """What the optimizer multiplies these gradients with."""
        return preconditioner(optimizer, self.params)

    def squared_norm(self, preconditioner: torch.Tensor | None) -> torch.Tensor:
        """Of what it holds, each element times the preconditioner's."""
        return squared_norm(self.body, preconditioner)

    def total(self) -> torch.Tensor:
        """The sum of all elements, in float32."""
        return self.body.sum(dtype=torch.float32)

    def is_finite(self) -> bool:
        """Whether all that it holds is finite."""
        return bool(self.body.isfinite().all())

    def own_is_finite(self) -> bool:
        """Whether this rank's own gradients, those of earlier micro-steps included, are finite."""
        tensors = [grad for grad in self.grads if grad is not None]
        if self.carried is not None:
            tensors.append(self.carried)
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

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

    def check(self) -> None:
        """Raise RuntimeError where :meth:`put` would."""
        check_gradients(self.params, [p.grad for p in self.params], complete=self.complete)

    def _put(self, weight: float) -> None:
        """As :meth:`put`, without its explanation of errors."""
        if not weight:  # a mean over nothing is no number
            self.body.zero_()
            return
        if self.complete and (weight == 1.0 or self.size < _LARGE * len(self.params)):
            grads: Any = self.grads  # all are there
            torch._foreach_copy_(self.views, grads)
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
        params, grads, views = self.params, [grad for grad in self.grads if grad is not None], self.views
        if len(grads) < len(params):
            there = [grad is not None for grad in self.grads]
            params, views = list(itertools.compress(params, there)), list(itertools.compress(views, there))
        if grads:
            torch._foreach_copy_(grads, views)
            self.written = params[0], weakref.ref(grads[0]), grads[0]._version
        self.grads = []  # else it would outlive zero_grad()

    @property
    def goes_on(self) -> bool:
        """Whether ``.grad`` still holds what was reduced: this backward pass has added to it, nobody zeroed it.

        ``zero_grad`` drops the tensor, or counts as one more change of it than the pass's own.
        """
        if self.written is None:
            return False
        param, grad, version = self.written
        return param.grad is not None and param.grad is grad() and param.grad._version <= version + self.additions

    def replace_buffer(self) -> None:
        """Leave the buffer to a reduction that was given up and may still write to it."""
        if self._memory is not None:
            self._hold(self.flat.clone())


class AllReduceOperation:
    """All-reduce of a flat bucket as it is, with what rides on it: a ``BucketOperation`` that keeps nothing."""

    def launch(self, bucket: Bucket, group: GradientCollectives) -> Sequence[Any]:
        """The whole buffer with its tail."""
        return (group.all_reduce(bucket.flat),)

    def go_on(self, bucket: Bucket, group: GradientCollectives, finished: int) -> Sequence[Any]:
        """The sum is there."""
        return ()

    def commit(self) -> None:
        """Nothing is kept."""

    def void(self) -> None:
        """Nothing is kept."""
