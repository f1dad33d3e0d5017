"""``AdaptiveDataParallel``: a model and its optimizer in a changing group of workers."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from elastic_ray.adaptation.policy import Policy, check_policies
from elastic_ray.batch.halving import LEAST_HALF
from elastic_ray.batch.scaling_rules import ScalingRule
from elastic_ray.loop.api import session_of_new_model
from elastic_ray.monitoring.gradient_measures import StepMeasures
from elastic_ray.monitoring.monitor import Monitor
from elastic_ray.parallel.buffers import BufferSync, SavedBuffers, WrittenTensors
from elastic_ray.parallel.finite_watch import FiniteWatch
from elastic_ray.parallel.flops import flops_on
from elastic_ray.parallel.model_copy import ModelCopy, copied, describe_model
from elastic_ray.parallel.model_parts import KeptModel, ModelParts, joined, joint_noise, schedulers_of
from elastic_ray.parallel.nonfinite import check_choice
from elastic_ray.parallel.out_of_memory import Untouched, evaluated_in_parts, give_zero_gradients, lost_output
from elastic_ray.parallel.patches import (
    after_step,
    check_scaler,
    check_schedule,
    evaluated,
    inner_optimizers,
    patch_scaler,
    patch_state_dict,
    patch_step,
    patch_zero_grad,
    refuse_several_evaluations,
    scale_rollback,
    watch_backward,
)
from elastic_ray.parallel.refusals import (
    NO_COMMUNICATION_HOOK,
    bounded_tables,
    check_stragglers,
    check_types,
    refuse_bounded_tables,
    refuse_divided_by_torch,
    refuse_graphed,
    refuse_in_unit,
    refuse_inner_training,
    refuse_options,
    refuse_parallel,
    warn_of_no_effect,
)
from elastic_ray.parallel.schedulers import LearningRates, Schedulers, policies_of, rules_of
from elastic_ray.parallel.torch_state_dicts import install_in_torch
from elastic_ray.run.registry import HookPoint, ModelFacts
from elastic_ray.state.registered import ModuleExtras
from elastic_ray.state.tree import DictState, OptimizerState
from elastic_ray.steps.out_of_memory import is_out_of_memory, let_go
from elastic_ray.sync.builders import StrategyBuilder, resolve_strategy
from elastic_ray.sync.choosing.explanation import StrategyTable
from elastic_ray.sync.engine.joint_optimizer import group_ranges
from elastic_ray.sync.engine.trainable import Trainable
from elastic_ray.sync.operations.gradient_checks import STEP_AFTER_BACKWARD
from elastic_ray.sync.sharded.model_tables import ModelTables
from elastic_ray.sync.sharded_parameters.model_checks import check_model, is_sharded_model, strategy_of
from elastic_ray.sync.spec import Strategy
from elastic_ray.sync.statistics.gradient_meter import GradientMeter
from elastic_ray.sync.statistics.gradient_statistics import GradientStatistics
from elastic_ray.sync.statistics.noise import NoiseTracker
from elastic_ray.sync.step_hooks import StepHooks
from placement.goodput.model import NoiseScale
from placement.text import count

if TYPE_CHECKING:
    from elastic_ray.adaptation.runner import PolicyRunner
    from elastic_ray.steps.step import LoaderStep
    from elastic_ray.sync.sharded_parameters.sharded_gradients import ShardedGradients

_ONE_VALUE = "Expected more than 1 value per channel when training"
_ADDED_UP = (
    "the loop began to add up gradients over several steps in a step that is cut in two to measure its noise: they "
    "count more than once. Later steps are not cut; let the loop add up gradients from its first step on"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSteps:
    """One optimizer of a wrapped model, with the objects that check, scale and apply its updates."""

    number: int
    optimizer: torch.optim.Optimizer
    groups: slice  # places of its parameter groups among those of all
    rates: LearningRates
    finite: FiniteWatch  # sees gradients that are not finite
    tiles: Any  # votes on updates and makes them
    hooks: StepHooks  # that user code has registered
    # carries out an update, and tells the statistics how far it moves the parameters
    measured: Callable[[Callable[[], Any]], Any]


class AdaptiveDataParallel(torch.nn.Module):
    """Wrapper that replicates ``module`` over the job's workers, like ``DistributedDataParallel``.

    When ``backward()`` returns, gradients are averaged over all samples of the step. ``optimizer.step()`` works as
    usual, with learning rates scaled for the current batch size. It does nothing while gradients are accumulated, or in
    a step that a failure has voided. Parameters, optimizer state and all other objects passed here are sent to every
    worker that joins later. Within an epoch, each worker has its own buffers (BatchNorm statistics). When a loader's
    pass ends and when the group changes, buffers are averaged (integers: copied from rank 0).

    The module's state dict has the prefix ``module.``, as in DDP. Wrap the model before the first epoch, identically on
    every worker.

    Args:
        module: The model, on its device.
        optimizer: Optimizer of this model's parameters, or several with separate parameters (such as Muon and AdamW).
            The loop must call each once per step, in the same order on every worker. Use one wrapper per model.
        lr_scheduler: Learning-rate scheduler (or several) of these optimizers. Every scheduler in use must be passed.
        schedule: Unit for a scheduler that steps with every batch. ``"progress"`` counts in steps of the initial batch,
            so that a decay ends after the planned number of samples; ``"steps"`` counts optimizer steps. ``"seesaw"``
            is ``"progress"`` with decays turned into batch growth (``adaptation.policies.seesaw``).
        grad_scaler: AMP's ``GradScaler``, if the loop uses one; gradient statistics need its scale.
        scaling_rule: How the learning rate depends on the batch size: a name (``"adascale"``, ``"adamscale"``,
            ``"adam"``, ``"linear"``, ``"sqrt"``, ``"legw"``, ``"none"``) or an object with ``factors(scale, noise,
            progress)``. The default is AdaScale, its square root for Adam-like optimizers, or ``"none"`` if the
            strategy averages models. User code and schedulers set the rates at the initial batch size.
        nonfinite: Response if the optimizer is about to apply NaN or infinite gradients, whichever rank they come from.
            ``"warn"`` reports them and applies them as PyTorch would, ``"skip"`` skips such updates on all ranks,
            ``"raise"`` ends the training, ``"ignore"`` does nothing. Except with ``"ignore"``, a train function that
            returns with non-finite parameters fails.
        strategy: How gradients or models are synchronised: a name (``"all_reduce"``, ``"powersgd"``, ... see
            ``elastic_ray.sync``), a builder, a ``Strategy``, or the path of a JSON file that contains a strategy; None
            means ``"all_reduce"``.
        policy: One or more adaptation policies (control loops over the run, see ``elastic_ray.adaptation``), called in
            order; None for none.
        monitor: Quantities to measure in addition to the noise scale, for :attr:`measures`; None for none.
        stragglers: Response to slow workers in a run without a trainer: ``"ignore"`` (same as None), ``"tell"`` (log
            them), or ``"share"`` (give them fewer samples).
        fold_random: If True, seed torch's generators differently on each rank, for different dropout masks. If False,
            leave the generators unchanged.

    Raises:
        TypeError: An argument has the wrong type, or is an argument of ``DistributedDataParallel`` that is not needed.
        ValueError: The optimizer's parameters are not the module's, or it has none; a parameter has no shape yet, or
            belongs to a model that was already wrapped; a gradient hook steps an optimizer; a trained embedding has
            ``max_norm``.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> model = AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    elastic_ray_wraps = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        lr_scheduler: Any = None,
        grad_scaler: Any = None,
        scaling_rule: ScalingRule | str | None = None,
        nonfinite: str = "warn",
        strategy: str | os.PathLike[str] | Strategy | StrategyBuilder | None = None,
        policy: Policy | Sequence[Policy] | None = None,
        monitor: Monitor | None = None,
        stragglers: str | None = None,
        schedule: str = "progress",
        fold_random: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        check_schedule(schedule)
        refuse_options(options)
        check_types(module, monitor, AdaptiveDataParallel)
        optimizers, whole = joined(module, optimizer)
        for each in optimizers:
            refuse_several_evaluations(each)
            refuse_divided_by_torch(each)
        check_choice(nonfinite)
        watched, policies = check_stragglers(stragglers), [*check_policies(policy), *policies_of(schedule)]
        rules = rules_of(scaling_rule, schedule, optimizers)
        self.module = module
        session = session_of_new_model()
        if session.run.unit is not None:
            refuse_in_unit(module)
        elif (session.elastic or session.group.world_size > 1) and not is_sharded_model(module):
            refuse_parallel(module)
        if session.elastic:
            refuse_graphed(module)
        self._bounded_tables = bounded_tables(module)
        refuse_bounded_tables(self._bounded_tables, session.group.most_workers)
        # What moves in a step is set in the object's dictionary: torch.nn.Module looks long at each attribute.
        self._called, self._scaler_checked = False, grad_scaler is not None
        self._forwarded: object = None  # step whose first forward pass has been looked at
        self._run = run = session.run
        self._optimizers, self._scaler = optimizers, grad_scaler
        self._updated: dict[int, int] = dict.fromkeys(map(id, optimizers), 0)  # most samples at once, by optimizer
        self._own_step: LoaderStep | None = None  # the latest outermost step for which an update was asked
        self._nested_in: LoaderStep | None = None  # the latest in which a loop within it asked for one
        if monitor is not None:
            run.registry.monitoring.ask(monitor)
        if session.elastic:
            warn_of_no_effect(watched, lacking=session.stragglers.lacks(watched))
        else:
            session.stragglers.ask(watched)
        if not fold_random:
            session.registry.folds_random = False
        try:
            kept = self._join_run(whole, nonfinite, strategy)
            self._steps = self._steps_of(kept, rules, nonfinite, session.adaptation.runner)
            self._register(kept, schedulers_of(lr_scheduler, optimizers), schedule)
            session.add_policies(policies)
        except BaseException:
            session.fail_opening()
            raise
        self._patch()
        device = self._trainable.params[0].device
        self._flops = None if self._sharded else flops_on(device)
        run.registry.efforts.append(lambda: self._flops.take_peak_s() if self._flops is not None else None)

    def _join_run(self, optimizer: torch.optim.Optimizer, nonfinite: str, strategy: Any) -> KeptModel:
        """Build the model's components and connect them to the run."""
        run, module, first = self._run, self.module, self._optimizers[0]
        self._sharded = run.unit is None and is_sharded_model(module)
        if self._sharded:
            check_model(module, optimizer, strategy=strategy, scaler=self._scaler)
        self._trainable = Trainable(module, optimizer)
        self._tracker = NoiseTracker(optimizer, len(self._trainable.groups), len(self._optimizers))
        self._statistics = GradientStatistics(self._tracker, GradientMeter(lambda: run.registry.monitoring.request))
        run.registry.monitoring.add_model(lambda: self.measures)
        builder = (
            strategy_of(module) if self._sharded else resolve_strategy("all_reduce" if strategy is None else strategy)
        )
        info = describe_model(module, optimizer, amp=self._scaler is not None, strategy=builder)
        facts = ModelFacts(
            noise=lambda: self.noise_scale,
            learning_rates=lambda: tuple(float(group["lr"]) for group in optimizer.param_groups),
            rate_factor=lambda: self._steps[0].rates.factor,
            signal=lambda: self._tracker.signal,
        )
        self._index = run.add_model(module, optimizer, info, facts)
        for each in self._optimizers:
            run.optimizers.known.add(each)
        self._saved_buffers = SavedBuffers(module) if nonfinite == "skip" else None
        self._tables = ModelTables(run, module, first, self._index, self._scaler)
        parts = ModelParts(run, module, self._trainable, optimizer, self._statistics, self._index, self._tables)
        kept = (
            parts.sharded()
            if self._sharded
            else parts.replicated(
                builder, self._tracker, self._grad_scale, check_finite=nonfinite != "ignore", scaler=self._scaler
            )
        )
        self._sync = kept.sync
        return kept

    def _steps_of(self, kept: KeptModel, rules: Any, nonfinite: str, policies: PolicyRunner) -> list[OptimizerSteps]:
        """Build the helpers for the steps of each optimizer."""
        found, run = list[OptimizerSteps](), self._run
        for number, (each, groups) in enumerate(zip(self._optimizers, group_ranges(self._optimizers), strict=True)):
            rates = LearningRates(
                each,
                rules[number],
                noise=functools.partial(self._noise_of, groups),
                epochs_done=lambda: run.ledger.epochs_done,
                policies=policies,
                held=self._tracker.held_factors[number],
                adam_steps=self._tracker.adam_steps[number],
            )
            if rates.wants_statistics:
                self._sync.require_statistics(rates.wants_statistics)
            found.append(
                OptimizerSteps(
                    number=number,
                    optimizer=each,
                    groups=groups,
                    rates=rates,
                    finite=FiniteWatch(run, self.module, self._index, nonfinite),
                    tiles=kept.optimizers[number],
                    hooks=StepHooks(each),
                    measured=kept.measured[number],
                )
            )
        return found

    def _noise_of(self, groups: slice) -> Sequence[NoiseScale | None]:
        """Return the noise scale of some parameter groups; the same object until it changes."""
        noise = self._tracker.by_group
        return noise if len(self._optimizers) == 1 else noise[groups]

    def _patch(self) -> None:
        """Route the optimizers' methods through this wrapper."""
        watch_backward()
        for each in self._steps:
            patch_step(each.optimizer, functools.partial(self._step, each))
            patch_state_dict(each.optimizer, each.tiles)
            install_in_torch(self, self.module, each.optimizer, each.tiles)
        if self._tables:
            patch_zero_grad(self._optimizers[0], self._tables.zero)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        own = vars(self.module).get("forward")
        try:
            if self._run.faults is not None:
                self._run.moment("forward")
            vars(self)["_called"] = True
            self._sync.before_forward()
            if (step := self._run.ledger.outermost) is not self._forwarded:
                vars(self)["_forwarded"] = step
                if step is not None and self._run.group.world_size == 1 and self._sync.is_open:
                    self._find_carried(step)
                if step is not None and self._run.ledger.drawn.waits and torch.is_grad_enabled():
                    self._run.ledger.drawn.check(
                        (args, kwargs), alone=not self._run.elastic and self._run.group.world_size == 1
                    )
            if self._saved_buffers is not None and self.module.training:
                self._saved_buffers.save(self._run.ledger.outermost, goes_on=self._sync.is_open)
            if self._bounded_tables:
                refuse_bounded_tables(self._bounded_tables, self._run.group.world_size)
            if self._flops is not None and step is not None:
                return self._flops.call(self.module, args, kwargs, step, self._run.group.rank)
            return self.module(*args, **kwargs)
        except ValueError as error:
            if not str(error).startswith(_ONE_VALUE):
                raise
            raise ValueError(self._too_few(str(error))) from error
        except (MemoryError, RuntimeError) as error:
            trains = torch.is_grad_enabled()
            if not self._lacks_memory(error, trains=trains):
                raise
            let_go(error)
        return self._forward_in_parts(trains, args, kwargs, own)  # with the failed one's frames gone

    def _lacks_memory(self, error: BaseException, *, trains: bool) -> bool:
        """True if parts of the batch replace a forward pass; it voids the step that it trains in."""
        if not is_out_of_memory(error) or torch._C._current_graph_task_id() != -1:
            return False  # a backward pass that has computed it again is lost as a whole
        return self._lose_step() if trains else not (self.module.training or self._run.unit)

    def _lose_step(self) -> bool:
        """Void the current step, which does not fit into memory; False if the error must be raised to the loop."""
        amp = self._sharded and self._scaler is not None  # which asks for gradients that nothing gives
        return not amp and self._run.run_out_of_memory()

    def _forward_in_parts(self, trains: bool, args: Any, kwargs: Any, own: Any) -> Any:
        """Return the output, computed in parts; if the model is training, return a lost step's output."""
        if self._sharded:  # torch takes the failed pass as in progress
            self._sync.end_lost_pass(give_zero_gradients)
        if not trains:
            agree = cast("ShardedGradients", self._sync).before_calls if self._sharded else None
            samples = self._run.evaluated_samples
            return evaluated_in_parts(self.module, args, kwargs, agree=agree, forward=own, samples=samples)
        params = [] if self._sharded else self._trainable.params
        return lost_output(self.module, args, kwargs, params, forward=own)

    def _end_lost_pass(self) -> None:
        """Join the reductions of other ranks after a backward pass ran out of memory."""
        self._sync.end_lost_pass(give_zero_gradients)
        if self._scaler is not None:  # it asks for gradients
            for param in () if self._sharded else self._trainable.params:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad

    def _too_few(self, torchs: str) -> str:
        """Return an explanation for BatchNorm's error with one sample: the division that caused it, and the remedy."""
        run = self._run
        step = run.ledger.outermost
        samples = sum(map(sum, step.sizes)) if step is not None else 0
        split = f"a step of {count(samples, 'sample')} on {count(run.group.world_size)}" if samples else "a batch"
        return (
            f"{torchs}: BatchNorm needs two samples at once, but {split} has left this worker one. Every worker takes "
            f"part in each step: choose a batch_size of at least twice the workers, or fewer workers; drop_last=True "
            "where the last batch is too small; or local_bsz_bounds from 2 for an adaptive batch"
        )

    def _find_carried(self, step: LoaderStep) -> None:
        """Detect pending gradients from an earlier step, which the halves of this rank's batch would count twice."""
        if any(p.grad is not None and bool(p.grad.any()) for p in self._trainable.params):
            self._run.registry.adds_up_gradients()
            if step.halved:
                self._run.notify("warning", _ADDED_UP)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[ModelCopy], tuple[torch.nn.Module, bool]]:
        """Reduce to a ``ModelCopy``; copies and pickles hold the current weights, and train nothing."""
        return copied(self.module, self.training)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model, like ``torch.nn.Module.zero_grad``."""
        super().zero_grad(set_to_none)
        self._tables.zero()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context where backward passes accumulate gradients locally, as with DDP's ``no_sync``."""
        return self._sync.no_sync()

    def join(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Return a context that does nothing, because all ranks have the same number of batches, unlike with DDP."""
        return nullcontext()

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Raise RuntimeError; hooks are not supported, because the strategy decides how gradients are sent."""
        raise RuntimeError(NO_COMMUNICATION_HOOK)

    @property
    def strategy(self) -> Strategy:
        """Strategy that currently synchronises the model."""
        return self._sync.strategy

    def set_strategy(self, strategy: str | os.PathLike[str] | Strategy | StrategyBuilder) -> None:
        """Switch to a different strategy from the next step on (KungFu's SetStrategy).

        Every rank must request the same strategy in the same step. If ranks differ, the next step raises an error.
        Within a round of model averaging, the switch happens after the round.

        Args:
            strategy: Same as in the constructor; ``"auto"`` starts a search for the fastest strategy.

        Raises:
            StrategyError: The strategy is unknown, or cannot be used with this model and optimizer.
            TypeError: The argument is not a strategy.
        """
        self._sync.set_strategy(strategy)

    def explain_strategy(self) -> StrategyTable:
        """Return a table that shows how and why each parameter is synchronised, with measured times; see ``str()``."""
        return self._sync.explain_strategy()

    @property
    def noise_scale(self) -> NoiseScale | None:
        """Smoothed gradient noise scale, the same on all ranks; None before the first estimate.

        With several optimizers, whose gradients have different units, each optimizer's estimate is weighted by the
        number of elements it updates.
        """
        if len(self._optimizers) == 1:
            return self._tracker.value
        groups = self._trainable.groups
        elements = [sum(p.numel() for group in groups[each.groups] for p in group) for each in self._steps]
        noises = [self._tracker.by_group[each.groups] for each in self._steps]
        return joint_noise(self._tracker.value, list(zip(noises, elements, strict=True)))

    @property
    def measures(self) -> StepMeasures:
        """Measurements requested by ``monitor=``, for the steps so far; the same on all ranks."""
        known = self._statistics.measures(self._run.registry.monitoring.meter.workers)
        return known if len(self._optimizers) == 1 else dataclasses.replace(known, noise=self.noise_scale)

    def gain(self, scale: float) -> float:
        """Return the number of steps at the initial batch size that equal one step at ``scale`` times that size.

        With the gradient's variance ``var`` and squared norm ``sqr``, the gain is (var + sqr) / (var / scale + sqr):
        between 1 and ``scale``, and 1 before the first estimate. Source: AdaScale SGD (ICML 2020).
        """
        noise = self.noise_scale
        return 1.0 if noise is None else float(noise.gain(scale))

    @property
    def scale_invariant_steps(self) -> float:
        """Progress in steps at the initial batch size: the summed gains of all steps (see :meth:`gain`)."""
        return self._tracker.progress

    def _grad_scale(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None and self._scaler.is_enabled() else 1.0

    def _register(self, kept: KeptModel, schedulers: Sequence[Sequence[Any]], schedule: str) -> None:
        """Register the state that other ranks need, and the state that a lost step must roll back."""
        states, registry, index = self._run.states, self._run.registry, self._index
        registry.add_hook(HookPoint.BEFORE_END, self._steps[0].finite.check_parameters)
        registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, self._trainable.check)
        registry.add_hook(HookPoint.BACKWARD_LOST, self._end_lost_pass)
        registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, self._ask_for_shares)
        registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, self._check_batch)
        registry.gradients.append(self._sync)
        states.register(f"model/{index}", kept.model_state)
        extras = ModuleExtras(self.module, warn=functools.partial(self._run.notify, "warning"))
        states.register(f"modules/{index}", extras)
        for number, each in enumerate(self._optimizers):
            name = f"optimizer/{index}.{number}" if number else f"optimizer/{index}"
            if number < len(kept.optimizer_states):  # of a sharded model, the first has the states of all
                states.register(name, kept.optimizer_states[number])
            for attribute, inner in inner_optimizers(each).items():
                states.register(f"{name}/{attribute}", OptimizerState(inner))
        for number, table in enumerate(self._tables.tables):
            states.register(f"rows/{index}/{number}", table)
        states.register_rollback(self._sync.remember, self._sync.roll_back, f"gradients/{index}", nested=False)
        states.register(f"noise/{index}", self._tracker)
        names = [f"{index}.{number}" if number else str(index) for number in range(len(self._optimizers))]
        self._schedulers = [
            Schedulers(self._run, each, *its, schedule)
            for each, its in zip(self._optimizers, zip(names, schedulers, strict=True), strict=True)
        ]
        if not self._sharded and (written := WrittenTensors(self.module)):
            states.register_rollback(written.remember, written.roll_back, f"written/{index}")
        saved = self._saved_buffers
        if saved is not None:
            registry.add_hook(HookPoint.UPDATE_LEFT_OUT, saved.restore)
            states.register_rollback(lambda: None, lambda _: saved.mend(), f"buffers/{index}", nested=False)
        if self._scaler is not None:
            if saved is not None:
                for each in self._optimizers:
                    after_step(self._scaler, each, saved.mend)
            patch_scaler(self._scaler, self._run)
            states.register(f"grad_scaler/{index}", DictState(self._scaler))
            states.register_rollback(*scale_rollback(self._scaler), f"grad_scaler/{index}")
        registry.buffers.append(BufferSync(self.module))
        registry.add_hook(HookPoint.SHAPE_CHANGED, self._statistics.invalidate)

    def _ask_for_shares(self) -> None:
        """Request at least two samples per rank if BatchNorm in training mode would fail with one."""
        norms = (each for each in self.module.modules() if isinstance(each, torch.nn.modules.batchnorm._BatchNorm))
        if any(each.training and not isinstance(each, torch.nn.SyncBatchNorm) for each in norms):
            self._run.registry.least_share = max(self._run.registry.least_share, LEAST_HALF)

    def _check_batch(self) -> None:
        """Require the gradient statistics that an adaptive batch needs."""
        loader = self._run.registry.loaders.info
        if loader is not None and not loader.limits.one_size:
            self._sync.require_statistics("an adaptive batch (AdaptiveDataLoader.autoscale_batch_size)")

    def _step(self, own: OptimizerSteps, apply: Any, closure: Any, **kwargs: Any) -> Any:
        """Execute ``optimizer.step``: call ``apply`` with scaled learning rates if the step counts."""
        value = None
        if closure is not None:
            value, kwargs = evaluated(own.optimizer, closure, kwargs)
        ledger = self._run.ledger
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"optimizer.step() was called within backward(): {STEP_AFTER_BACKWARD}")
        self._sync.before_update()
        self._run.replicas.trained[id(self.module)] = self.module.training
        self._check_called()
        if not self._scaler_checked:
            self._scaler_checked = True
            check_scaler(self._run)
        if self._trainable.left_out:
            self._trainable.drop_strangers()
        outer = ledger.outermost
        vars(self)["_own_step" if ledger.step is outer else "_nested_in"] = outer
        if outer is not None and self._own_step is self._nested_in:
            refuse_inner_training(self._run, outer)
        if not ledger.may_apply():
            if ledger.repeats_update and not self._sharded:
                own.hooks.repeat(self._params_of(own), kwargs)
            return value
        if voted := not own.tiles.idle and own.tiles.votes:
            kwargs = own.hooks.before(kwargs)
        if ledger.failed or (not own.tiles.idle and not own.tiles.decide()):  # a hook's collective may have lost it
            return value
        self._sync.applied()
        if not self._counts(own):
            for table in self._tables.tables:
                table.leave_out()
            ledger.applied()
            return value
        step = ledger.outermost
        scale = step.scale if step is not None else 1.0
        if own is self._steps[0]:  # the others' steps are of the same samples
            self._tracker.advance(scale, None if scale == 1.0 else self.noise_scale)
        # Memory runs out with the first update, which makes the optimizer's state, or with a batch that is larger.
        untouched, most = None, max(map(max, step.sizes)) if step is not None else 0
        if most > self._updated[id(own.optimizer)]:
            untouched = Untouched(own.optimizer, self._params_of(own))
        rates = own.rates.scale(scale, has_statistics=self._sync.gives_statistics)
        try:
            if not voted and own.hooks.comes_first:
                kwargs = own.hooks.before(kwargs)
                if self._run.ledger.failed:
                    return value
            ledger.updating = True
            result = self._update(own, apply, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not self._lose_update(own, untouched, error):
                raise
            return value
        finally:
            if rates is not None:
                own.rates.restore(rates)
        self._updated[id(own.optimizer)] = max(most, self._updated[id(own.optimizer)])
        ledger.applied()
        return result

    def _lose_update(self, own: OptimizerSteps, untouched: Untouched | None, error: BaseException) -> bool:
        """Void a step whose update has run out of memory; False if the error must be raised to the loop."""
        alone = untouched is not None and self._run.progress.optimizers_stepped == 0 and not own.tiles.divided
        lost = is_out_of_memory(error) and alone and untouched is not None and untouched.undo()
        if not lost or not self._lose_step():
            return False
        self._run.ledger.updating = False
        let_go(error)
        return True

    def _update(self, own: OptimizerSteps, apply: Any, **kwargs: Any) -> Any:
        """Call ``apply``, measure how far it moves parameters if requested, then update tables' rows."""
        meter, options = self._statistics.meter, self._schedulers[own.number]
        update = functools.partial(apply if own.tiles.idle else functools.partial(own.tiles.update, apply), **kwargs)
        before = options.before_update()
        # Hooks change options once more when a lost step is drawn again: what they change is not kept with the update.
        apart = before is not None and not self._sharded and own.hooks.follows
        with own.hooks.left_out(after=apart) if apart or own.hooks.comes_first else nullcontext():
            result = own.measured(update) if meter.on and meter.wants_update else update()
        if before is not None:
            options.keep_moved(before)
        if apart and not self._run.ledger.failed:  # else parameters are not published yet
            own.hooks.after(kwargs)
        if self._sync.averages:
            self._sync.scale_moments(own.optimizer)
        if self._tables.tables and own is self._steps[0]:
            self._tables.update()
        return result

    def _params_of(self, own: OptimizerSteps) -> list[torch.nn.Parameter]:
        """Return the parameters that an optimizer updates."""
        return [p for group in self._trainable.groups[own.groups] for p in group]

    def _check_called(self) -> None:
        """Raise RuntimeError if parameters became trainable but the model is not called through the wrapper."""
        called, vars(self)["_called"] = self._called, False
        if not called and self._trainable.changed():
            raise RuntimeError(
                "parameters became trainable, but the model is not called through AdaptiveDataParallel, which would "
                "take them in: call the wrapped model, model(x), not the one inside it"
            )

    def _counts(self, own: OptimizerSteps) -> bool:
        """True if the update counts; a skipped update changes neither statistics nor buffers."""
        saved = self._saved_buffers
        left_out = False
        scaled = getattr(own.optimizer, "found_inf", None) is not None  # AMP's scaler has a fused optimizer step
        params = self._trainable.params
        if len(self._optimizers) > 1:
            params = self._params_of(own)
        run, finite, suspects = self._run, own.finite, self._sync.nonfinite_ranks
        if known := suspects is None and run.group.world_size > 1 and run.wishes is None:  # all ranks' are finite
            finite.streak.clear()
        if known or finite.are_finite(params, suspects, scaled=scaled):
            self._statistics.applied()
        else:
            self._statistics.invalidate()  # what it has measured is of no use
            if left_out := saved is not None:
                self._run.registry.call(HookPoint.UPDATE_LEFT_OUT)
        if saved is not None:
            saved.discard()
        return not left_out


# Code that asks for torch's wrapper, to look inside or to leave "module." out of names, is right for this one as well.
torch.nn.parallel.DistributedDataParallel.register(AdaptiveDataParallel)
