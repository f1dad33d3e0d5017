"""The synchronisation engine: gradients of all ranks into their weighted mean, statistics along the way.

One asynchronous all-reduce per bucket, started as soon as backward has filled it, awaited at the end of backward,
so that ``.grad`` holds the mean when ``loss.backward()`` returns, as under torch DDP. Gradients are weighted by
samples, so unequal local batches give the gradient of the whole batch. The reduction works on buffers of its own: one
that was given up can never write into ``.grad``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elastic_ray.membership.rendezvous import CommunicationFailedError
from elastic_ray.parallel.buckets import Bucket, build_buckets
from elastic_ray.parallel.noise import NoiseTracker
from elastic_ray.session import CONTROL_SIZE, Session
from elastic_ray.step import Step


class GradientReducer:
    """Hooks on parameters of one model; see the module's text.

    Args:
        groups: parameters of each of the optimizer's parameter groups.
        session: the run.
        noise: takes the statistics.
        grad_scale: AMP's present loss scale, 1 without AMP.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.nn.Parameter]],
        session: Session,
        noise: NoiseTracker,
        grad_scale: Callable[[], float],
    ) -> None:
        self._session = session
        self._noise = noise
        self._grad_scale = grad_scale
        params = sum(len(group) for group in groups)
        # Control values, squared norms of local gradients, rank 0's noise scale, and which parameters were used.
        self._norms = slice(CONTROL_SIZE, CONTROL_SIZE + len(groups))
        self._shared = slice(self._norms.stop, self._norms.stop + 2 * len(groups))
        self._used = slice(self._shared.stop, self._shared.stop + params)
        self._buckets, self._tail = build_buckets(groups, self._used.stop)
        last = self._buckets[-1]
        self._tail_rides = self._tail.data_ptr() == last.flat[last.body.numel() :].data_ptr()
        self._works: list[Any] = []
        self._local_norms = [0.0] * len(groups)
        self._running = False
        self._launched = 0
        self._sync = True
        self._weight = 1.0
        self._measure = False
        position = {id(p): i for i, p in enumerate(p for group in groups for p in group)}
        self._positions = [[position[id(p)] for p in bucket.params] for bucket in self._buckets]
        for bucket in self._buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    functools.partial(self._on_gradient, bucket)
                )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to ``.grad`` of this rank (as DDP's ``no_sync``)."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    # -- during backward ---------------------------------------------------------------------------------------

    def _on_gradient(self, bucket: Bucket, _param: torch.Tensor) -> None:
        if not self._running:
            if not self._sync:
                return
            self._begin()
        bucket.pending -= 1
        if bucket.pending == 0 and self._reduces:
            self._launch_ready()

    def _begin(self) -> None:
        session = self._session
        session.moment("backward")
        step = session.step
        self._running = True
        self._launched = 0
        self._works = []
        for bucket in self._buckets:
            bucket.pending = len(bucket.params)
        self._weight = step.weight(session.rank) if step is not None else 1.0 / session.world_size
        last = step is None or step.is_last_micro
        self._reduces = last and session.world_size > 1 and not session.failed
        self._accumulates = step is not None and step.micro_steps > 1
        if step is None or step.micro == 0:
            self._local_norms = [0.0] * len(self._local_norms)
            for bucket in self._buckets:
                bucket.holds_sum = False
            replicas = session.world_size * (step.micro_steps if step is not None else 1)
            self._measure = step is not None and self._noise.measures(session.progress.steps, replicas)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _fill(self, bucket: Bucket) -> None:
        """The bucket's weighted local gradients, and their squared norm."""
        grads = [p.grad for p in bucket.params]
        weight = self._weight
        if self._accumulates:
            weight /= self._grad_scale()  # the loss scale may move between micro-steps
        if self._measure:
            self._local_norms[bucket.group] += self._noise.local_norm(grads, bucket)
        for grad, view in zip(grads, bucket.views, strict=True):
            if grad is None:
                if not bucket.holds_sum:
                    view.zero_()
            elif bucket.holds_sum:
                view.add_(grad, alpha=weight)
            else:
                torch.mul(grad, weight, out=view)
        bucket.holds_sum = True

    def _launch_ready(self) -> None:
        """Start reductions in the fixed order, as far as buckets are full."""
        try:
            while self._launched < len(self._buckets) and self._buckets[self._launched].pending == 0:
                bucket = self._buckets[self._launched]
                self._fill(bucket)
                self._launched += 1
                last = self._launched == len(self._buckets)
                if last:
                    self._fill_tail()
                self._works.append(self._session.communicator.all_reduce(bucket.flat))
                if last and not self._tail_rides:
                    self._works.append(self._session.communicator.all_reduce(self._tail))
                if self._launched == 1:
                    self._session.moment("allreduce")
        except CommunicationFailedError as error:
            self._give_up(str(error))

    def _fill_tail(self) -> None:
        session = self._session
        used = [float(p.grad is not None) for b in self._buckets for p in b.params]
        order = [position for positions in self._positions for position in positions]
        flags = [0.0] * len(used)
        for position, flag in zip(order, used, strict=True):
            flags[position] = flag
        shared = self._noise.shared_values() if session.rank == 0 else [0.0] * (self._shared.stop - self._shared.start)
        values = [*session.control_values(), *self._local_norms, *shared, *flags]
        self._tail.copy_(torch.tensor(values, dtype=self._tail.dtype))

    # -- at the end of backward --------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._running = False
        step = self._session.step
        if self._reduces:
            for bucket in self._buckets:
                bucket.pending = 0  # parameters without a gradient in this pass
            self._launch_ready()
            self._collect(step)
        elif self._accumulates:
            for bucket in self._buckets:
                self._fill(bucket)
            if step is not None and step.is_last_micro and not self._session.failed:
                self._write_back(self._buckets)
                self._statistics(step, self._local_norms)
        elif self._measure and step is not None and not self._session.failed:
            self._noise.pair(step, self._buckets, self._grad_scale(), self._session.progress.steps)

    def _collect(self, step: Step | None) -> None:
        session = self._session
        if session.failed:
            return
        try:
            for work in self._works:
                session.communicator.wait(work)
        except CommunicationFailedError as error:
            self._give_up(str(error))
            return
        values = self._tail.tolist()
        session.control_result(values[:CONTROL_SIZE])
        self._noise.take_shared(values[self._shared])
        self._write_back(self._buckets, values[self._used])
        session.reduced()
        if step is not None and self._measure:
            self._statistics(step, values[self._norms])

    def _give_up(self, cause: str) -> None:
        self._session.fail_step(cause)
        # The abandoned reduction may still write into the old buffers.
        for bucket in self._buckets:
            bucket.flat = bucket.flat.clone()
            bucket.body = bucket.flat[: bucket.body.numel()]
            offset, views = 0, []
            for p in bucket.params:
                views.append(bucket.body[offset : offset + p.numel()].view(p.shape))
                offset += p.numel()
            bucket.views = views
        last = self._buckets[-1]
        self._tail = last.flat[last.body.numel() :] if self._tail_rides else self._tail.clone()
        self._works = []

    @torch.no_grad()
    def _write_back(self, buckets: Sequence[Bucket], used: Sequence[float] | None = None) -> None:
        factor = self._grad_scale() if self._accumulates else 1.0
        for bucket, positions in zip(buckets, self._positions, strict=True):
            if factor != 1.0:
                bucket.body.mul_(factor)
            grads, views = [], []
            for p, view, position in zip(bucket.params, bucket.views, positions, strict=True):
                if p.grad is not None:
                    grads.append(p.grad)
                    views.append(view)
                elif used is not None and used[position] > 0:
                    p.grad = view.clone()  # used on other ranks only
            if grads:
                torch._foreach_copy_(grads, views)

    def _statistics(self, step: Step, local_norms: Sequence[float]) -> None:
        self._noise.collect(
            step,
            local_norms,
            self._buckets,
            replicas=self._session.world_size,
            grad_scale=self._grad_scale(),
            steps=self._session.progress.steps,
        )
