"""Gradient synchronisation for a sharded model, built around torch's own gathers and scatters (torch).

When ``backward()`` returns, ``.grad`` of each rank's rows holds the mean over the step's samples. As with replicated
models, ranks announce their actions before collectives and agree on the step during reductions, and a lost step ends
without an exception in user code.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.run.participant import Participant
from elastic_ray.state.layout import digest
from elastic_ray.steps.drawn_batches import DRAWN_AHEAD
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.engine.trainable import Trainable
from elastic_ray.sync.operations.gradient_checks import OUTSIDE_OF_LOADERS, Finiteness, refuse_own
from elastic_ray.sync.sharded_parameters import model_checks as checks
from elastic_ray.sync.sharded_parameters.fsdp_fields import (
    install_hooks,
    is_backward_over,
    reduce_rest,
    reshard,
    to_sharded,
    units_of,
    watch_use,
)
from elastic_ray.sync.sharded_parameters.shard_collectives import GatherShards, ScatterGradients, ShardCollectives
from elastic_ray.sync.sharded_parameters.sharded_optimizer import ShardedOptimizer
from elastic_ray.sync.spec import Strategy

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.steps.step import LoaderStep
    from elastic_ray.sync.sharded_parameters.shard_statistics import ShardStatistics


class ShardedGradients(Participant):
    """Gradient synchronisation for one sharded model; implements ``GradientSync``."""

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        trainable: Trainable,
        optimizer: ShardedOptimizer,
        collectives: ShardCollectives,
        statistics: ShardStatistics,
        number: int,
    ) -> None:
        self._run, self._module, self._optimizer, self._number = run, module, optimizer, number
        self._trainable, self._collectives, self._statistics = trainable, collectives, statistics
        self._step: LoaderStep | None = None
        self._task = -1  # autograd's number of the backward pass in progress
        self._reduces = self._warned = False
        self._waits = False  # gradients of a step wait for the optimizer
        self._micro_steps = MicroSteps(self._gradients)
        self._has_gradient: set[nn.Parameter] = set()  # in the pass in progress; torch gives zeros to the others
        self.nonfinite_ranks: list[int] | None = None
        collectives.adapt(self.entered)
        module.register_forward_pre_hook(self._start_anew, prepend=True)
        module.register_forward_hook(self._after_forward)
        for place, unit in enumerate(units_of(module)):
            gather, scatter = GatherShards(collectives, place), ScatterGradients(collectives, place)
            install_hooks(unit, gather, scatter, collectives.weigh_alone)
            watch_use(unit, self._reached)

    # -- forward -------------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Prepare for a forward pass, which all ranks must run at the same point.

        Raises:
            RanksDisagreeError: Other ranks do something different at this point.
            RuntimeError: The model cannot be called at this point; the message says why.
            ValueError: The optimizer lacks an unfrozen parameter, or a parameter has a hook that torch ignores.
            CommunicationFailedError: The group broke outside steps.
        """
        step = self._run.ledger.step
        self._optimizer.check_memory()
        checks.refuse_gradient_hooks(self._optimizer.params)
        if self._trainable.changed():
            self._trainable.include_unfrozen()
            self._statistics.rebuilt()
        if step is not None and step.whole:  # also where no rank shares rows: the group may grow
            raise RuntimeError(
                "a sharded model cannot be called in a pass over whole_batches=True: near its end some ranks of a "
                "group have no batch, but parameters are gathered by all of them; evaluate without whole_batches"
            )
        self.before_calls()

    def before_calls(self, parts: int = 0) -> None:
        """Agree with all ranks to call the model, once or for each of ``parts`` parts of a batch.

        Raises:
            RanksDisagreeError: Other ranks do something different, such as calling the model with whole batches.
            CommunicationFailedError: The group broke outside steps.
        """
        if not self._meets:
            return
        try:
            self._collectives.start(Announced(Intent.SHARDS, self._number, parts << 2))
        except CommunicationFailedError as error:
            self._run.ledger.lose_by(error)

    @property
    def _meets(self) -> bool:
        """True if the next collective includes other ranks."""
        ledger = self._run.ledger
        return self._run.group.world_size > 1 and not ledger.failed and not ledger.replaying

    def _start_anew(self, module: nn.Module, arguments: Any) -> None:
        """Reset torch's state if the model is called after a backward pass that raised an exception.

        Otherwise, the next backward pass would wait forever for the failed one to finish.
        """
        if self._task != -1 and torch._C._current_graph_task_id() == -1:
            self._task = -1
            to_sharded(self._module)

    # Else what it looks at here, as the group, has torch compile the model anew.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Prepare for backward after the model returns, even if user code called it without its wrapper."""
        step = self._run.ledger.step
        if not torch.is_grad_enabled() or (step is not None and step.leaves_ranks_idle):
            reshard(self._module)  # torch leaves the outermost module gathered for a backward pass
        if not torch.is_grad_enabled():
            return
        on_gradient = functools.partial(self._on_gradient, generation=self._run.group.generation)
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def join(self, what: Announced) -> None:
        self._collectives.join(units_of(self._module), what)

    # -- backward ------------------------------------------------------------------------------------------------------

    def _on_gradient(self, gradient: Tensor, *, generation: int) -> None:
        """Check and start handling a backward pass when it reaches the model's output."""
        if torch.is_grad_enabled():
            raise RuntimeError(checks.CREATES_GRAPH)
        if generation != self._run.group.generation:
            raise RuntimeError(checks.OF_ANOTHER_GROUP)
        self.entered()

    def entered(self) -> None:
        """Start handling the current backward pass, if any, unless this has already been done."""
        task = torch._C._current_graph_task_id()
        if task != -1 and self._task == -1:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            self._start()

    def _reached(self, param: nn.Parameter) -> None:
        """Record that a backward pass has a parameter's gradient, even if only part of the model was called."""
        self.entered()
        self._has_gradient.add(param)

    def _start(self) -> None:
        """Start a backward pass: decide how to handle its gradients, and announce it."""
        run, step = self._run, self._run.ledger.step
        run.moment("backward")
        self._reduces = self._meets
        self.nonfinite_ranks = None
        if step is None:
            self._step = None
            if self._reduces and run.ledger.drawn.ahead:
                raise RuntimeError(DRAWN_AHEAD)
            if self._reduces and not self._warned:
                self._warned = True
                run.notify("warning", OUTSIDE_OF_LOADERS)
        else:
            self._start_in(step)
        self._has_gradient = {each.param for each in self._optimizer.params if each.param.grad is not None}
        self._statistics.start_pass(step)
        self._collectives.start_pass(1.0 / run.group.world_size if step is None else step.weight(run.group.rank))
        try:
            if self._reduces:
                self._collectives.start(Announced(Intent.GRADIENTS, self._number, self._layout, checks.SHARDED.name))
            self._statistics.find_denominators()
        except CommunicationFailedError as error:
            self._fail(str(error))

    def _start_in(self, step: LoaderStep) -> None:
        """Start a backward pass in a loader's step.

        Raises RuntimeError if the loop sets micro-batch weights, or accumulates gradients over several steps.
        """
        if step.weighed:
            raise RuntimeError("loader.weigh(n) and a sharded model exclude each other: see docs/sharded-models.md")
        if step is not self._step:
            if self._waits and any(each.param.grad is not None for each in self._optimizer.params):
                raise RuntimeError(
                    "gradients of a sharded model cannot be added up over several steps of a loader: call "
                    "optimizer.step() in each of them, or let the loader accumulate "
                    "(autoscale_batch_size(..., gradient_accumulation=True)). optimizer.zero_grad() before backward() "
                    "drops gradients that are not needed"
                )
            self._step = step
            self._micro_steps.discard()
            self._run.ledger.mark_training()
        self._micro_steps.start_pass(step)
        step.backward = step.micro
        self._waits = True

    @property
    def _layout(self) -> int:
        params = [(each.name, each.shape, each.param.requires_grad) for each in self._optimizer.params]
        return digest([params, self._statistics.layout])

    def _gradients(self) -> list[Tensor | None]:
        return [each.local_grad for each in self._optimizer.params]

    def _finish(self) -> None:
        """Finish the backward pass, or wait for torch to finish it first."""
        if not is_backward_over(self._module):
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            return
        reduce_rest(self._module)
        self._task = -1
        step, run = self._step, self._run
        if step is not None:
            self._statistics.end_pass(step)
            self._micro_steps.end_pass(step)
            self._statistics.conclude_alone(step)
        try:
            if not self._reduces:
                self._leave_out_unused(self._used)
            elif not run.ledger.failed:
                self._agree(step)
        except CommunicationFailedError as error:
            self._fail(str(error))

    @property
    def _used(self) -> list[bool]:
        """List of flags: True for each parameter that has a gradient on this rank, from this pass or an earlier one."""
        earlier = self._micro_steps.has
        return [each.param in self._has_gradient or earlier(i) for i, each in enumerate(self._optimizer.params)]

    def _leave_out_unused(self, used: Sequence[float]) -> None:
        """Set gradients to None for parameters not used on any rank, because torch returns zeros for them."""
        for place, (each, count) in enumerate(zip(self._optimizer.params, used, strict=True)):
            if not count:
                each.param.grad = None
                self._micro_steps.leave_out(place)

    def _agree(self, step: LoaderStep | None) -> None:
        """Agree on the step in a separate reduction of the values usually sent with the gradients."""
        run, consensus, group = self._run, self._run.consensus, self._run.group
        flags = [0.0] * (group.world_size + 1)
        mean = Finiteness()
        for grad in self._gradients():
            if grad is not None:
                mean.add(grad)
        flags[group.rank], flags[-1] = float(not self._collectives.finiteness.found()), float(not mean.found())
        own = [*consensus.control_values(group.rank), *consensus.step_tag()]
        used = self._used
        values = torch.tensor([*own, *flags, *used, *self._statistics.values()], dtype=torch.float64)
        self._collectives.comes_next("the end of a backward pass")
        work = group.communicator.gradients.all_reduce(values)
        consensus.announcer.done()
        run.moment("allreduce")
        consensus.announcer.wait(work)
        sums = values.tolist()
        consensus.check_same_step(sums[consensus.control_size : len(own)])
        rest = iter(sums[len(own) :])
        found, counts = list(itertools.islice(rest, len(flags))), list(itertools.islice(rest, len(used)))
        bad = [rank for rank, flag in enumerate(found[:-1]) if flag]
        self.nonfinite_ranks = bad if bad or found[-1] > 0 else None
        complete = step is None or step.is_last_micro
        self._statistics.take(list(rest), counts=complete)
        self._leave_out_unused(counts)
        if complete:
            consensus.conclude(sums[: consensus.control_size], group.world_size)
            run.ledger.reduced |= step is run.ledger.outermost

    def _fail(self, cause: str) -> None:
        """Mark the step as failed; raises CommunicationFailedError outside steps."""
        self._run.ledger.fail(cause)
        if self._step is None:
            raise CommunicationFailedError(cause)

    def no_sync(self) -> AbstractContextManager[None]:
        """Raise RuntimeError, because ``no_sync`` is not supported for sharded models."""
        raise RuntimeError(
            "no_sync() is not supported for a sharded model, of which no rank could hold whole gradients: let the "
            "loader accumulate (autoscale_batch_size(..., gradient_accumulation=True))"
        )

    # -- the optimizer -------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._waits

    def end_lost_pass(self, give_zeros: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Free gathered parameters after a backward pass that raised an error; ``give_zeros`` is unused."""
        self._task = -1
        to_sharded(self._module)

    def before_update(self) -> None:
        """Prepare for an optimizer step; raises RuntimeError if no backward pass has averaged its gradients."""
        step = self._run.ledger.step
        if step is not None and step.is_last_micro and self._meets and not self._waits and step is not self._step:
            refuse_own(self._gradients())
        self._statistics.close()
        if step is None or step.is_last_micro:
            self._waits = False

    def rebuild(self) -> None:
        """Reset the statistics after the trainable parameters have changed; torch itself adapts to such changes."""
        self._statistics.rebuilt()

    def require_statistics(self, user: str) -> None:
        """Do nothing, because statistics are always measured."""

    # -- steps that are lost -------------------------------------------------------------------------------------------

    def roll_back(self, remembered: Any) -> None:
        """Undo a lost step: discard its gradients and statistics."""
        self._waits, self._step = False, None
        self._statistics.discard()
        self._micro_steps.discard()
        self._task = -1
        for each in self._optimizer.params:
            each.param.grad = None

    # -- the strategy --------------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """Strategy that identifies the sharded model's layout for users and in records."""
        return checks.SHARDED

    @property
    def strategy_name(self) -> str:
        return checks.SHARDED.name

    @property
    def strategy_key(self) -> str:
        return checks.key_of(self._collectives.shard_size)

    def set_strategy(self, strategy: object) -> None:
        """Raise StrategyError, because a sharded model's strategy cannot be changed."""
        raise StrategyError(checks.NO_STRATEGY)

    def explain_strategy(self) -> Any:
        """Raise StrategyError, because a sharded model has no strategy to explain."""
        raise StrategyError(checks.NO_STRATEGY)

    # -- the group -----------------------------------------------------------------------------------------------------

    meets_in_passes = True

    @property
    def settled(self) -> bool:
        return self._optimizer.settled

    @property
    def divided(self) -> bool:
        """True if other ranks hold some of the model's rows."""
        return self._optimizer.divided

    def collapse(self, *, gather: bool = True, alike: bool = False) -> None:
        """Compare the copies of shards and gather the model on rank 0 if ``gather``; otherwise do nothing.

        A model built on the meta device is only compared, because it may not fit on rank 0.
        """
        if gather:
            self._optimizer.end_pass()

    def prepare_to_save(self) -> None:
        """Gather the full model and optimizer state on rank 0, which keeps them until the next update."""
        self._optimizer.gather()

    def before_change(self, stays: Sequence[bool]) -> None:
        """Send shards held only by leaving ranks to ranks that stay; ``stays[r]`` is True if rank r stays."""
        self._optimizer.hand_over(stays)

    def enter_group(self) -> None:
        self._waits, self._task = False, -1
        self._collectives.enter_group()
        self._micro_steps.discard()
        self._statistics.enter_group()
        self._optimizer.enter_group()


# User code zeroes gradients in each micro-step as it always does: a micro-step contributes what `.grad` holds after
# its last backward pass, and in the last one `.grad` holds the sum.
class MicroSteps:
    """Sums of gradients over a step's micro-steps.

    Args:
        gradients: Returns the gradients for this rank's rows; None for a parameter without a gradient.
    """

    def __init__(self, gradients: Callable[[], Sequence[Tensor | None]]) -> None:
        self._gradients = gradients
        self._micro = 0
        self._before: list[Tensor | None] | None = None  # the sum of the micro-steps before
        self._so_far: list[Tensor | None] | None = None  # the same with the present one
        self._added = False  # that sum is in .grad

    def discard(self) -> None:
        """Clear the sums, because another step is starting or the current step is lost."""
        self._micro, self._before, self._so_far, self._added = 0, None, None, False

    def start_pass(self, step: LoaderStep) -> None:
        """Start a backward pass in the step's current micro-step, keeping the sums of earlier micro-steps."""
        if step.micro != self._micro:
            self._micro, self._before, self._added = step.micro, self._so_far, False
        elif self._added and not any(bool(grad.any()) for grad in self._gradients() if grad is not None):
            self._added = False  # user code has cleared them between two losses of one step

    @torch.no_grad()
    def end_pass(self, step: LoaderStep) -> None:
        """End a pass: save the sum so far or, in the last micro-step, add it to ``.grad``."""
        if step.micro_steps == 1:
            return
        own = self._gradients()
        before = self._before or [None] * len(own)
        if not step.is_last_micro:
            self._so_far = [_sum(each, other) for each, other in zip(own, before, strict=True)]
        elif not self._added:
            self._added = True
            for each, other in zip(own, before, strict=True):
                if each is not None and other is not None:
                    each.add_(other)

    def has(self, place: int) -> bool:
        """True if an earlier micro-step has left a gradient for the parameter at this position."""
        return self._before is not None and self._before[place] is not None

    def leave_out(self, place: int) -> None:
        """Discard the latest pass's zero gradient for a parameter not used on any rank."""
        if self._so_far is not None:
            self._so_far[place] = None


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients as a new tensor; None stands for zero."""
    if one is None:
        return None if other is None else other.clone()
    return one.clone() if other is None else one + other
