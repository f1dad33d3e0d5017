"""Reduction of all ranks' gradients to their weighted mean, with statistics measured along the way.

Buckets are all-reduced asynchronously. A bucket's reduction starts as soon as backward has filled the bucket, and is
awaited when backward ends, so ``.grad`` holds the mean when ``loss.backward()`` returns, as under torch DDP. In a
model's first pass, with several models, and in nested passes (which produce a gradient several times), reductions start
when the outermost pass ends. Gradients are weighted by samples, or as specified by the loop, so unequal local batches
give the whole batch's gradient. Under a plain all-reduce, ``.grad`` is a view of the bucket. If a reduction is
abandoned, it keeps its memory and ``.grad`` gets new memory, so that it can never overwrite tensors in use.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.state.layout import digest
from elastic_ray.steps.drawn_batches import DRAWN_AHEAD
from elastic_ray.sync.device_numbers import Number, added, read
from elastic_ray.sync.engine.carried_gradients import CarriedGradients
from elastic_ray.sync.engine.reduction import (
    BucketLayout,
    Reduction,
    StepWeights,
    SummingGroup,
    hooks_on_gradients,
    refuse_weights,
)
from elastic_ray.sync.engine.trainable import Trainable
from elastic_ray.sync.operations.bucket_operation import GradientBucket
from elastic_ray.sync.operations.buckets import AllReduceOperation, Bucket
from elastic_ray.sync.operations.gradient_checks import OUTSIDE_OF_LOADERS
from elastic_ray.sync.statistics.gradient_statistics import GradientStatistics

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.steps.step import LoaderStep


class GradientReducer:
    """Reducer of one model's gradients, driven by hooks on its parameters during backward.

    With gradient accumulation, each micro-step contributes the ``.grad`` that its last backward pass left before
    ``optimizer.step()``, so user code may zero, clip and unscale gradients in each micro-step as usual.

    Args:
        check_finite: Whether to determine which ranks have NaN or infinite gradients.
        exchange_rows: Sends a pass's row gradients to the row owners; None without tables.
    """

    def __init__(
        self,
        trainable: Trainable,
        lay_out: Callable[[Trainable], BucketLayout],
        carried: CarriedGradients,
        context: Run,
        group: SummingGroup,
        statistics: GradientStatistics,
        grad_scale: Callable[[], float],
        number: int,
        *,
        check_finite: bool,
        exchange_rows: Callable[[], None] | None,
    ) -> None:
        self._number, self._exchange_rows = number, exchange_rows
        self._lay_out, self._check_finite = lay_out, check_finite
        self._warned = self._tried = False
        self._told = False  # the pass is announced
        self._unanswered = False  # announced, and not yet answered
        self._met: tuple[int, Announced] | None = None  # the generation and layout in which all have met
        self.nonfinite_ranks: list[int] | None = None  # ranks whose gradients were not, in this step
        self._context = context
        self._ledger, self._group, self._consensus = context.ledger, group, context.consensus
        self._carried, self._statistics, self._grad_scale = carried, statistics, grad_scale
        self._trainable = trainable
        self._hooks: list[Any] = []
        self._one_at_a_time = threading.RLock()
        self._build()
        self._step: LoaderStep | None = None
        self._open = True  # until the optimizer steps
        self._carries = False  # earlier micro-steps have left something
        self._in_layers = False  # the step's single gradient is measured in layers
        self._running, self._sync = False, True
        self._drifts = False  # this rank steps with gradients of its own
        self._micro = self._launched = 0
        self._weight, self._weights = 1.0, StepWeights(group, context.consensus, statistics)
        self._reduces = self._accumulates = self._measures = False
        self._reached: set[int] = set()  # parameters that have a gradient of this pass, by id
        self._task = -1  # autograd's number of the pass
        self._note = 0  # of its gradients, as this rank has told it
        self._nests = False  # passes within passes were seen, as of reentrant checkpoints: gradients come several times
        self._knows = False  # a pass was seen to its end
        self._early = False  # buckets are reduced while the pass continues
        self._goes_on = False  # the pass adds to what this step has reduced already
        self._complete = True  # the pass has reached every parameter
        self._own_sums: list[Number] = []  # of what this rank has put into buckets
        # By bucket: parameters whose gradients lie in memory of their own, and how many elements may still do so.
        self._waiting: list[list[int]] = []
        self._room: list[float] = []
        self._left: list[float] = []

    def _build(self) -> None:
        """Lay out buckets for the currently trainable parameters, and register hooks on their gradients."""
        layout = self._layout = self._lay_out(self._trainable)
        self._buckets = layout.buckets
        self.reduction = Reduction(self._group, self._consensus, layout, self._grad_scale)
        self._sizes = [len(bucket.params) for bucket in self._buckets]
        self._pending = [0] * len(self._buckets)
        self.let_go()
        self._hooks = [
            hook
            for bucket in self._buckets
            for place, param in enumerate(bucket.params)
            for hook in hooks_on_gradients([param], _gradient_hook(weakref.ref(self), bucket.index, place, param))
        ]
        self.enter_group()

    @property
    def sends_in_pairs(self) -> bool:
        """True if some buckets are not reduced by a plain all-reduce."""
        return any(type(each) is not AllReduceOperation for each in self._layout.operations)

    @property
    def plain_buckets(self) -> list[Bucket] | None:
        """The model's buckets, if all hold full gradients (no slices or table rows); otherwise None."""
        found = [bucket for bucket in self._buckets if type(bucket) is Bucket]
        return found if len(found) == len(self._buckets) else None

    def let_go(self) -> None:
        """Remove the hooks from the model's parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def enter_group(self) -> None:
        """Mark the bucket layout as not compared yet, so that ranks announce it again in the new group."""
        plain, strategy = self._layout.digest, self._layout.strategy
        self._plain = Announced(Intent.GRADIENTS, self._number, plain, strategy)
        # Where the loop sets the weights of micro-batches, there is one more collective.
        weighed = digest((plain, "weighed")), f"{strategy}, weighed by loader.weigh()"
        self._weighed = Announced(Intent.GRADIENTS, self._number, *weighed)
        if self._group.group.world_size == 1:
            self._layout.release()
        self._knows = False  # as a joiner: what user code sends within a backward pass is in one order on all ranks

    def adapt(self, *, changed: bool) -> None:
        """Rebuild the buckets before a forward pass, if parameters were unfrozen or the layout must change."""
        if self._running and torch._C._current_graph_task_id() == -1:
            self._running = False  # user code has caught an exception of a backward pass
        if self._running or not (changed or self._trainable.changed()):
            return
        if self._step is not None and self._ledger.outermost is self._step:
            return  # from the next step on; until then nobody trains it
        self.rebuild()

    def rebuild(self) -> None:
        """Rebuild the buckets after the set of trainable parameters has changed."""
        if self._trainable.changed():
            self._trainable.include_unfrozen()
        self.reduction.end_step()
        self._build()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients only locally in backward passes within the context, like DDP's ``no_sync``."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def drop_halves(self) -> None:
        """Release the buffers of a step that was split in half for a measurement."""
        if self._step is not None and self._step.halved:
            self._layout.release()  # a rank that is alone uses it in such steps only

    def close(self, *, refuses_own: bool) -> None:
        """Close gradient accumulation when the optimizer steps; later gradients belong to another loss."""
        if refuses_own and (self._step is None or self._step is not self._ledger.step):
            self._carried.refuse_own()
        self._open = False
        self._carried.taken()
        self.reduction.asked = True

    def _keep_local(self) -> None:
        """Record a gradient from a backward pass within ``no_sync``."""
        self._carried.add(self._ledger.step, local=True)
        refuse_weights(self._ledger.step)

    def _nest(self) -> None:
        """Record a nested backward pass."""
        self._nests, self._early = True, False

    def _reach_again(self, index: int, param: torch.Tensor) -> None:
        """Handle a nested backward pass that adds to an already complete gradient.

        Raises RuntimeError if the gradient is already being reduced.
        """
        if index < self._launched:
            raise RuntimeError(
                f"a gradient of shape {tuple(param.shape)} was added to when it was being averaged already: the model "
                "uses a layer several times under reentrant checkpointing, and has not until now. Checkpoint with "
                "use_reentrant=False, or do so from the first step on"
            )
        self._buckets[index].add_again(param)

    def _start(self) -> None:
        """Decide at a backward pass's first gradient whether the pass is reduced, accumulated and measured."""
        if self._context.faults is not None:
            self._context.moment("backward")
        step = self._ledger.step
        self._running = True
        self._task = torch._C._current_graph_task_id()
        self._reached = set()
        self._told = False
        # Several models' gradients may come in one pass, in turns, and are to be reduced in one order on all ranks.
        self._early = self._knows and not self._nests and self._context.models == 1
        self._launched = 0
        self._goes_on, self._complete = False, True
        self._pending = list(self._sizes)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._reduces = self._accumulates = self._measures = False
        self._own_sums = []
        if step is None:
            self._step = self.nonfinite_ranks = None
            self.reduction.start_step(self._context.states.progress.steps)
            self._reduces = self._group.world_size > 1 and not self._ledger.replaying
            if self._reduces and self._ledger.drawn.ahead:
                raise RuntimeError(DRAWN_AHEAD)
            if self._reduces and not self._warned:
                self._warned = True
                self._context.notify("warning", OUTSIDE_OF_LOADERS)
            self._start_buckets(first=False)
            return
        first = step is not self._step
        if first:
            self._start_step(step)
        elif step.micro != self._micro:
            self._carry()
        elif self._open and self._in_layers:  # two losses, one after the other
            self._statistics.drop_examples()
            self._in_layers = False
            self._context.registry.need_halves()
        world_size = 1 if self._drifts else self._group.group.world_size
        self._carried.add(step, local=self._drifts)
        self._micro = step.micro
        last = step.is_last_micro
        if not (last or self._open):
            self._start_buckets(first=False)
            return
        step.backward = step.micro
        if step.weighed:
            self._weights.start_pass(step)
        rank = self._group.group.rank
        self._weight = step.own_weight(rank) if self._drifts else step.weight(rank)
        self._reduces = last and world_size > 1 and not self._ledger.failed
        self._accumulates = step.micro_steps > 1
        if self._statistics.due:
            self._statistics.start_pass()
            self._measures = self._open and not self._ledger.failed
        self._start_buckets(first=first)

    def _start_buckets(self, *, first: bool) -> None:
        """Prepare all buckets for the pass; ``first`` is True if it is the first in its step."""
        self._waiting, self._room = [], []
        for bucket in self._buckets:
            self._waiting.append([])
            room = bucket.start_pass(first=first, reduces=self._reduces, accumulates=self._accumulates)
            self._room.append(room)
        self._left = list(self._room)
        if self._reduces and self._early:
            self._announce()

    def _adopt(self, index: int) -> None:
        """Move waiting gradients out of their own memory into their bucket."""
        waiting, self._waiting[index], self._left[index] = self._waiting[index], [], self._room[index]
        self._buckets[index].adopt(waiting)

    def _announce(self) -> None:
        """Announce this rank's reduction to the other ranks, which reply while backward continues."""
        self._told = True
        weighed = self._step is not None and self._step.weighed
        self._announced = self._weighed if weighed else self._plain
        try:
            self._unanswered = self._consensus.announce_reductions(self._announced, known=self._met_before())
        except CommunicationFailedError as error:
            self._give_up(str(error))

    def _met_before(self) -> bool:
        """True if reductions may start before the other ranks have replied.

        Only reductions use the gradient group, so a reduction cannot be paired with any other kind of collective. It
        could be paired with a reduction for a different layout, but not once all ranks have announced the current
        layout.
        """
        met = self._met == (self._group.group.generation, self._announced)
        return met and self._context.models == 1

    def _meet(self) -> None:
        """Wait until all ranks have made the same announcement."""
        self._unanswered = False
        self._consensus.agreed()
        self._met = (self._group.group.generation, self._announced)

    def _start_step(self, step: LoaderStep) -> None:
        """Start the first backward pass of a step."""
        self._step = step
        self.nonfinite_ranks = None
        self._open, self._carries = True, False
        self._drifts = self._group.model.average is not None and self._group.drifts
        steps = self._context.states.progress.steps
        exact = self.reduction.start_step(steps)
        self._ledger.mark_training()
        self._in_layers = self._statistics.in_layers
        self._statistics.start_step(
            step,
            steps,
            replicas=1 if self._drifts else self._group.group.world_size,
            exact=exact and not self._drifts,
            spacing=self.reduction.spacing,
        )

    def _carry(self) -> None:
        """Start another micro-step, keeping the gradients that earlier micro-steps have left in the buckets."""
        self._open, self._carries = True, True
        if self._statistics.due:
            self._statistics.carry()
        for bucket in self._buckets:
            bucket.carry()

    def _fill(self, bucket: GradientBucket) -> None:
        """Fill a bucket with the weighted local gradients, add earlier micro-steps' gradients, and measure its norm."""
        weight, rest, goes_on = self._weight, None, bucket.written is not None and bucket.goes_on
        if self._accumulates:
            if goes_on:  # each rank gives its part of what was reduced before, less what its gradient weighs already
                rest = bucket.share(1.0 / self._group.world_size - weight)
            elif self._carries:
                weighed = self._step is not None and self._step.weighed
                rest = bucket.carried_share(self._weights.factor if weighed else 1.0)
        self._goes_on = self._goes_on or goes_on
        own = bucket.put(weight, sums=self._check_finite and self._reduces)
        if own is not None:
            self._own_sums.append(own)
        if self._measures:
            self._statistics.add(bucket, weight)
        if self._accumulates:
            bucket.record_used()
        if rest is not None:
            bucket.add(rest)

    def _launch(self) -> None:
        """Start reducing full buckets, in a fixed order."""
        if self._ledger.failed:
            return
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                return self._launch()
        try:
            if self._launched == 0 and not self._pending[0]:
                if self._unanswered and not self._met_before():
                    self._meet()
                if self._step is None or self._step.weighed:
                    self._weight = self._weights.share(self._step, reduces=True)
            while self._launched < len(self._buckets) and not self._pending[self._launched]:
                bucket = self._buckets[self._launched]
                self._fill(bucket)
                self._launched += 1
                last = self._launched == len(self._buckets)
                if last:
                    self._fill_tail()
                self.reduction.launch(bucket.index)
                if last:
                    self._consensus.announcer.done()
                if self._launched == 1 and self._context.faults is not None:
                    self._context.moment("allreduce")
        except CommunicationFailedError as error:
            self._give_up(str(error))

    def _fill_tail(self) -> None:
        """Write the values sent with the reduction into the last bucket's tail."""
        rank = self._group.group.rank
        shared = self._statistics.shared_values() if rank == 0 else self._layout.nothing_to_share
        self._note = self._carried.note
        tag = self._consensus.step_tag(self._note)
        head = [*self._consensus.control_values(rank), *self._layout.no_norms, *shared, *tag]
        norms = self._statistics.local_norms() if self._measures else ()
        self._layout.write_tail(head, norms, added(self._own_sums), None if self._complete else self._used())

    def _used(self) -> list[bool]:
        """Return a flag for each parameter, True if it had a gradient on this rank in any micro-step."""
        flags = [bucket.used if self._accumulates else bucket.has_gradient for bucket in self._buckets]
        return [used for mine in flags for used in mine]

    def _finish(self) -> None:
        """End the backward pass: launch the remaining reductions, wait for all, and write the mean to ``.grad``."""
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                return self._finish()
        self._running, self._knows = False, True
        if self._trainable.left_out:
            self._trainable.drop_strangers()
        step = self._step
        for bucket in self._buckets:
            if self._pending[bucket.index]:
                bucket.mark_incomplete()
        self._pending = [0] * len(self._buckets)
        if self._reduces:
            self._complete = True
            for bucket in self._buckets:
                self._complete = self._complete and bucket.complete
            if not (self._told or self._ledger.failed):  # by another model of this pass
                self._announce()
            if self._launched < len(self._buckets):
                self._launch()
            self._collect(step)
        elif step is None:
            return
        elif self._accumulates:
            if step.is_last_micro:
                self._weight = self._weights.share(step, reduces=False)
            for bucket in self._buckets:
                self._fill(bucket)
            if step.is_last_micro and not self._ledger.failed:
                self._write_back(lambda: [used for bucket in self._buckets for used in bucket.used])
                if self._measures:
                    self._statistics.set_mean_norms(
                        self._statistics.mean_norms(self._buckets, first=True, everywhere=False)
                    )
                    self._conclude_statistics(step, read(self._statistics.local_norms()))
        else:
            left_out = step.weighed and self._weights.leave_out(step, self._buckets)
            if not left_out and (
                self._measures or (not self._tried and self._group.world_size == 1 and step.micro_steps == 1)
            ):
                self._measure_alone()
        if self.reduction.owing and step is not None and step.is_last_micro and not self._ledger.failed:
            self.reduction.complete()

    def end_lost_pass(self, give_zeros: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """End a lost step's backward pass, which raised; ``give_zeros(params)`` sets missing gradients to zero."""
        if self._ledger.failed:
            self._running = False
        elif self._running:
            self._finish()
        else:
            give_zeros(self._trainable.params)

    def _collect(self, step: LoaderStep | None) -> None:
        """Wait for the reductions, evaluate the values sent with them, and write the mean back."""
        if self._ledger.failed:
            return
        layout, first = self._layout, self._group.group.rank == 0
        try:
            if self._unanswered:
                self._meet()
            self.reduction.finish(checks=self._check_finite)
            add_up = self.reduction.add_up if layout.sliced else None
            norms: Sequence[Number] = (
                self._statistics.mean_norms(self._buckets, first=first, everywhere=add_up is not None)
                if self._measures
                else []
            )
            totals = self.reduction.totals
            values, numbers = layout.read_tail([*totals, *norms])
            sums = numbers[: len(totals)]
            self.reduction.check_totals([*sums, values[layout.own_sum]] if self._check_finite else sums)
            self._consensus.check_same_step(values[layout.step_tag], self._note)
            if self._measures:
                self._statistics.set_mean_norms(numbers[len(totals) :], add_up)
            if self._check_finite:
                self.nonfinite_ranks = self.reduction.nonfinite_ranks()
            if self._exchange_rows is not None:
                self._exchange_rows()
        except CommunicationFailedError as error:
            self._give_up(str(error))
            return
        self._consensus.conclude(values[: layout.norms.start], self._group.group.world_size)
        self._statistics.set_shared(values[layout.shared], first=first)
        self._write_back(layout.used_anywhere)
        self._ledger.reduced |= step is self._ledger.outermost
        self._carried.local = False
        if step is not None and self._measures:
            self._conclude_statistics(step, values[layout.norms])

    def _give_up(self, cause: str) -> None:
        """Abandon this step's reductions; raises CommunicationFailedError outside steps."""
        self._ledger.fail(cause)
        self.reduction.void()
        self._layout.replace_buffers()
        if self._step is None:
            raise CommunicationFailedError(cause)  # outside of steps there is none to draw again

    def _write_back(self, used: Callable[[], list[bool]]) -> None:
        """Copy buckets into ``.grad``; ``used`` returns, for each parameter, whether any rank had a gradient."""
        first = 0
        for bucket in self._buckets:
            last = first + len(bucket.params)
            if bucket.index not in self.reduction.written:
                bucket.write_back(lambda: used()[first:last])  # noqa: B023
            first = last

    def _conclude_statistics(self, step: LoaderStep, norms: Sequence[float]) -> None:
        """Collect the step's statistics, unless they are mixed with gradients reduced earlier in the step."""
        if not (self._goes_on and self._accumulates):
            self._statistics.collect(step, norms, grad_scale=self._grad_scale(), goes_on=self._goes_on)

    @torch.no_grad()
    def _measure_alone(self) -> None:
        """Check and measure the gradients of a rank that is training alone."""
        step, statistics = self._step, self._statistics
        in_layers = step is not None and self._measures and statistics.in_layers
        if step is not None and in_layers and not statistics.collect_examples(step, self._grad_scale()):
            self._context.registry.need_halves()
        if not self._tried:
            self._tried = True  # what buckets refuse is better told with the first gradient
            for bucket in self._buckets:
                bucket.check()
        if self._measures and self._statistics.wants_norms:
            for bucket in self._buckets:
                bucket.put(1.0)
            self._statistics.collect_alone(self._buckets, self._grad_scale())
            self._layout.release()


def _gradient_hook(
    reference: weakref.ref[GradientReducer], index: int, place: int, own: torch.Tensor
) -> Callable[[torch.Tensor], None]:
    """Return a hook for a parameter's gradient that does not keep the reducer alive; see ``weak_hook``."""
    key, elements = id(own), own.numel()

    def hook(param: torch.Tensor) -> None:
        """Record a parameter's gradient and reduce full buckets; torch calls the hook in one thread per device."""
        reducer = reference()
        if reducer is None:
            return
        with reducer._one_at_a_time:
            if reducer._carried.watched is param:
                reducer._carried.check(param)
            if not reducer._running:
                if not reducer._sync:
                    reducer._keep_local()
                    return
                reducer._start()
            if torch._C._current_graph_task_id() != reducer._task:
                reducer._nest()
            if key in reducer._reached:
                reducer._reach_again(index, param)
                return
            reducer._reached.add(key)
            if reducer._reduces:
                reducer._waiting[index].append(place)
                reducer._left[index] -= elements
                if reducer._left[index] <= 0:
                    reducer._adopt(index)
            pending = reducer._pending
            pending[index] -= 1
            if not pending[index] and reducer._reduces and reducer._early:
                reducer._launch()

    return hook
