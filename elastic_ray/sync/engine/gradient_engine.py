"""Gradient synchronisation of a replicated model, with every rank applying the complete mean gradient."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.consensus.intents import Announced
from elastic_ray.run.participant import Participant
from elastic_ray.state.layout import digest
from elastic_ray.sync.averaging.batch_moments import scale_moments
from elastic_ray.sync.averaging.drift import Drift
from elastic_ray.sync.builders import StrategyBuilder
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.choosing.explanation import StrategyTable
from elastic_ray.sync.engine.carried_gradients import CarriedGradients, OwedGradients
from elastic_ray.sync.engine.joint_optimizer import optimizers_of
from elastic_ray.sync.engine.reducer import GradientReducer
from elastic_ray.sync.engine.reduction import BucketLayout, SummingGroup, make_operation
from elastic_ray.sync.engine.row_steps import RowSteps
from elastic_ray.sync.engine.trainable import Trainable, layers_by_parameter, local_groups, profile_of
from elastic_ray.sync.engine.unit_statistics import UnitStatistics, held_by_several, why_not_in_units
from elastic_ray.sync.plan import ModelProfile, SyncPlan
from elastic_ray.sync.spec import Strategy
from elastic_ray.sync.statistics.example_norms import ExampleNorms
from elastic_ray.sync.statistics.gradient_statistics import GradientStatistics
from elastic_ray.sync.switching.strategy_in_force import StrategyInForce
from elastic_ray.sync.tables.row_bucket import RowBucket
from elastic_ray.sync.tables.table_gradient import TableGradient

if TYPE_CHECKING:
    from elastic_ray.consensus.unit_wishes import UnitWishes
    from elastic_ray.run.run import Run
    from elastic_ray.sync.optimizer_tiles.tiled_optimizer import TiledOptimizer
    from elastic_ray.sync.sharded.model_tables import ModelTables
    from placement.cluster.jobs import FoundStrategy


class GradientEngine(Participant):
    """Gradient synchronisation for one replicated model according to its strategy; implements ``GradientSync``.

    The engine's state consists of the gradients accumulated by user code over several steps, the current strategy, and
    the state kept by operations between steps.

    Args:
        check_finite: Whether to determine which ranks have NaN or infinite gradients.
        tiles: State of each optimizer, which the strategy may divide across ranks.

    Raises StrategyError if the strategy cannot be used with this model and optimizer.
    """

    def __init__(
        self,
        context: Run,
        module: torch.nn.Module,
        trainable: Trainable,
        optimizer: torch.optim.Optimizer,
        builder: StrategyBuilder,
        statistics: GradientStatistics,
        grad_scale: Callable[[], float],
        number: int,
        *,
        check_finite: bool,
        scaler: Any = None,
        tables: ModelTables,
        tiles: Sequence[TiledOptimizer],
    ) -> None:
        self._context, self._module, self._trainable, self._optimizer = context, module, trainable, optimizer
        self._statistics_for: list[str] = []
        self._sharded, self._tiles = tables, tiles
        self._held = held_by_several(context.unit, module) if context.unit is not None else frozenset[str]()
        self._in_force = StrategyInForce(context, self, builder, number)
        self._asked_before = self._in_force.asked  # when the step in progress began
        self._entering = True  # until the present group's first step
        self._stepped: tuple[int, float] | None = None  # steps before the latest optimizer step, and when that was
        self._check_tables(self.plan.strategy)
        self._check_tiles(self.plan)
        self._check_unit(self.plan)
        self._carried = CarriedGradients(context, optimizer)
        self._in_unit = UnitStatistics(context.unit, module, statistics) if context.unit is not None else None
        self._tables: Sequence[TableGradient] = ()
        self._owed = OwedGradients(context)
        self._control_size = 0
        self._statistics = statistics
        self.drift: Drift = Drift(context, trainable, optimizer, number, scaler)
        self._expected: object = None  # step in which layers were last asked to measure
        self._ends = False  # whether another strategy comes after the step that ranks have agreed on
        self._row_steps = [RowSteps(each) for each in optimizers_of(optimizer)]
        self._reducer = GradientReducer(
            trainable,
            self._lay_out,
            self._carried,
            context,
            SummingGroup(context, self.drift),
            statistics,
            grad_scale,
            number,
            check_finite=check_finite,
            exchange_rows=tables.exchange if tables else None,
        )

    @property
    def plan(self) -> SyncPlan:
        """Current synchronisation plan: buckets, the operation that reduces each bucket, and owners."""
        return self._in_force.plan

    @property
    def strategy(self) -> Strategy:
        """Strategy currently used to synchronise the model."""
        return self.plan.strategy

    @property
    def strategy_name(self) -> str:
        return self.plan.strategy.name or "by hand"

    @property
    def strategy_key(self) -> str | None:
        force = self._in_force
        return force.own_key if force.tuner is None else force.key

    @property
    def found_strategies(self) -> Mapping[str, FoundStrategy]:
        return self._in_force.tuner.found if self._in_force.tuner is not None else {}

    @property
    def profile(self) -> ModelProfile:
        """Profile of the model, in the form expected by strategy builders."""
        self._trainable.check()
        return profile_of(self._module, self._trainable.groups, self._optimizer)

    def check(self, plan: SyncPlan) -> None:
        """Raise StrategyError if this model cannot be trained with the plan."""
        self._check_statistics(plan.strategy)
        self._check_tables(plan.strategy)
        self._check_tiles(plan)
        self._check_unit(plan)
        for bucket in plan.buckets:
            make_operation(bucket)

    @property
    def nonfinite_ranks(self) -> Sequence[int] | None:
        """Ranks whose gradients were NaN or infinite in this step's reduction; None if all were finite.

        While replicas diverge, nothing is reduced, so this list can contain only this rank, and its gradients are not
        checked yet.
        """
        if self.drift.average is not None and self.drift.on:
            return [self._context.group.rank]
        return self._reducer.nonfinite_ranks

    @property
    def is_open(self) -> bool:
        return self._carried.is_open

    @property
    def local(self) -> bool:
        """True if accumulated gradients have not been reduced because of ``no_sync``."""
        return self._carried.local

    def set_strategy(self, strategy: object) -> None:
        self._in_force.ask(strategy)

    def keep_strategy(self) -> None:
        self.set_strategy(self.strategy)

    def set_topology(self, topology: str) -> None:
        self._in_force.ask_topology(topology)

    def explain_strategy(self) -> StrategyTable:
        """Return a table that shows how each parameter's gradient is synchronised, and why."""
        return self._in_force.explain()

    def require_statistics(self, user: str) -> None:
        """Require gradient statistics for the setting ``user``; from now on, strategies without them are refused.

        Raises StrategyError if the current strategy does not provide statistics.
        """
        self._statistics_for.append(user)
        try:
            self._check_statistics(self.plan.strategy)
        except StrategyError:
            self._statistics_for.pop()
            raise

    def _check_unit(self, plan: SyncPlan) -> None:
        """Raise StrategyError if the plan divides work among ranks in a way that jobs with units do not support."""
        if self._context.unit is None:
            return
        what, why = f"strategy {plan.strategy.label!r}", why_not_in_units(plan, self.profile.params, self._held)
        if self._sharded:
            what, why = "a ShardedEmbedding", "divide the table within the unit, over elastic_ray.unit_mesh()"
        if why:
            raise StrategyError(f"{what} is not supported in a job of units (SchedulingConfig(unit=)): {why}")

    def _check_statistics(self, strategy: Strategy) -> None:
        """Raise StrategyError if gradient statistics are required but the strategy averages models."""
        if self._statistics_for and strategy.average is not None:
            raise StrategyError(
                f"{self._statistics_for[0]} needs the gradient noise scale, but strategy "
                f"{strategy.name or strategy.average.algorithm!r} averages models, so that there is no gradient of the "
                'whole batch to measure it by: use a strategy that reduces gradients, as "all_reduce", or '
                'scaling_rule="none", "linear", "sqrt" or "legw" and a fixed batch'
            )

    def _check_tiles(self, plan: SyncPlan) -> None:
        """Raise StrategyError if an optimizer needs its complete state between steps, like schedule-free optimizers."""
        for each in optimizers_of(self._optimizer) if plan.tiles is not None else ():
            if callable(getattr(each, "train", None)) and callable(getattr(each, "eval", None)):
                raise StrategyError(
                    f"{type(each).__name__} switches parameters by what it keeps of them (optimizer.train() and "
                    "eval()), of which each rank would have a part: use a strategy that keeps optimizer state whole on "
                    "each rank, as 'all_reduce'"
                )

    def _check_tables(self, strategy: Strategy) -> None:
        """Raise StrategyError if ranks that share a table's rows would drift apart."""
        if self._sharded and strategy.average is not None:
            raise StrategyError(
                f"strategy {strategy.name or strategy.average.algorithm!r} averages models that ranks train by "
                "themselves, but all ranks share the rows of a ShardedEmbedding: use one that reduces gradients"
            )

    def before_forward(self) -> None:
        """Prepare for a forward pass, and rebuild the buckets if parameters were unfrozen or the strategy changes."""
        force = self._in_force
        if force.tuner is not None:
            force.before_forward()
        self._reducer.adapt(changed=(force.asked is not None or force.wanted is not None) and self._may_switch)
        for each in self._tiles:
            if not each.idle and each.unsettled:
                each.divide_between_steps()
        if self.drift.average is not None:
            self.drift.start_step()
        if self._in_unit is not None:
            self._in_unit.before_forward()
        if self._statistics.examples is not None:
            self._expect_examples(self._statistics.examples)

    def measure_examples(self, every: int | None, *, wanted: bool) -> bool:
        known = self._statistics.examples
        if wanted and known is not None and known.every == every:
            return True
        if not wanted or self._reducer.plain_buckets is None or self._context.unit is not None:
            self._statistics.measure_in(None)
            return False
        examples = ExampleNorms(self._module, self._trainable.params, every)
        self._statistics.measure_in(examples if examples.is_enough else None)
        return examples.is_enough

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _expect_examples(self, examples: ExampleNorms) -> None:
        """Register hooks on the layers if this step's single gradient will be measured."""
        step, steps = self._context.ledger.outermost, self._context.states.progress.steps
        if step is None or step is self._expected or not torch.is_grad_enabled():
            return
        self._expected = step
        examples.stop()
        one = step.leads and step.micro_steps == 1 and self._context.group.world_size == 1 and step.count > 1
        buckets = self._reducer.plain_buckets
        if not one or buckets is None or self._carried.is_open or not examples.due(steps, step.scale):
            return
        if self._statistics.noise.measures_at(steps):
            examples.start(steps, step.count, buckets, self._statistics.noise.preconditioner)

    def let_go(self) -> None:
        """Remove all hooks, so that another run in this process can wrap the model again."""
        self._reducer.let_go()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager that makes backward passes only accumulate gradients locally."""
        if self._sharded:
            raise RuntimeError(
                "no_sync() is not supported for a model with a ShardedEmbedding, whose owners get gradients in each "
                "step: let the loader accumulate (autoscale_batch_size(..., gradient_accumulation=True))"
            )
        return self._reducer.no_sync()

    def end_lost_pass(self, give_zeros: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Complete the reductions of a backward pass that raised; ``give_zeros(params)`` zeroes missing gradients."""
        self._reducer.end_lost_pass(give_zeros)

    def before_update(self) -> None:
        """Close gradient accumulation before an update; gradients computed later belong to another loss.

        Raises RuntimeError if gradients were not averaged over the ranks, for parameters with divided optimizer state.
        """
        if self._in_unit is not None and self._context.wishes is not None:
            self._settle_in_unit(self._in_unit, self._context.wishes)
        self._reducer.close(
            refuses_own=self._in_force.plan.tiles is not None
        )  # nothing else would tell: tiles are not compared
        now_s, steps = time.perf_counter(), self._context.states.progress.steps
        if self._stepped is not None and steps == self._stepped[0] + 1:
            self._in_force.step_s.append(now_s - self._stepped[1])
        self._stepped = steps, now_s
        for each in self._row_steps:
            if not each.idle:
                each.stand_inside()
        for table in self._sharded.tables:
            table.close()

    def _settle_in_unit(self, statistics: UnitStatistics, wishes: UnitWishes) -> None:
        """Apply a step on all of the unit's workers, or on none."""
        ledger = self._context.ledger
        if ledger.step is not None and ledger.step.is_last_micro:
            failure = self._context.agree_in_unit(ledger.failure, measured=statistics.due())
            if failure is not None:
                ledger.fail(failure)
            elif any(wishes.measured):  # not in a later update of the step
                statistics.add_up(wishes.measured, self._statistics_for)

    def applied(self) -> None:
        self._carried.applied = True
        self._reducer.reduction.applied()
        if self.drift.average is not None:
            self.drift.record_update()

    def scale_moments(self, optimizer: torch.optim.Optimizer) -> None:
        average, step = self.drift.average, self._context.ledger.outermost
        if average is not None and self.drift.on and step is not None:
            own = sum(step.sizes[self._context.group.rank])
            scale_moments(optimizer, step.count / own if own else 1.0)

    def rebuild(self) -> None:
        """Rebuild the gradient buckets after a change in the trained parameters."""
        self._reducer.rebuild()

    @property
    def gives_statistics(self) -> bool:
        return self._in_force.plan.strategy.average is None

    @property
    def drifts(self) -> bool:
        return self.drift.average is not None and self.drift.on

    @property
    def may_train(self) -> bool:
        return self._module.training and torch.is_grad_enabled()

    @property
    def settled(self) -> bool:
        return self.drift.settled and self._sharded.settled and all(each.settled for each in self._tiles)

    def fix_drift(self) -> int:
        """Fix the strategy for the next step; return a digest of this strategy and the current plan.

        Ranks compare the digest before they commit a step. Later requests wait for the next step, because some ranks
        might not receive them before the end of this step.
        """
        self._ends = self._in_force.pending
        return digest((self.plan.digest, self._in_force.asked_digest))

    def prepare_average(self, *, ends_pass: bool) -> None:
        if not self._in_force.pending:
            self.drift.prepare(ends_pass=ends_pass)

    def after_step(self, *, agree_on_scale: bool) -> None:
        self._reducer.drop_halves()
        if self.drift.average is not None:
            self.drift.after_step(ends=self._ends)
        if agree_on_scale:
            self.drift.agree_on_scale()

    @property
    def divided(self) -> bool:
        return any(each.divided for each in self._tiles)

    @property
    def tabled(self) -> bool:
        return bool(self._sharded)

    @property
    def meets_in_passes(self) -> bool:
        """True if forward passes fetch rows from other ranks."""
        return self.tabled

    @property
    def sends_in_pairs(self) -> bool:
        """True if rows or parts of gradients are exchanged."""
        return self.meets_in_passes or self._reducer.sends_in_pairs

    def join(self, what: Announced) -> None:
        self._sharded.join(what)

    @property
    def merge_layout(self) -> int:
        """Digest of the tensors that replicas merge: parameters and optimizer state."""
        return self.drift.layout

    def collapse(self, *, gather: bool = True, alike: bool = False) -> None:
        self._make_one(alike=alike)
        if gather:
            self._gather_tiles()

    def _gather_tiles(self) -> None:
        for each in self._tiles:
            each.gather()

    def _make_one(self, *, alike: bool = False) -> None:
        if self.drifts:
            self.drift.collapse(alike=alike)

    def prepare_to_save(self) -> None:
        """Gather complete tables and optimizer state on rank 0, which keeps them until the next update."""
        for table in self._sharded.tables:
            table.gather()
        self._gather_tiles()

    def before_change(self, stays: Sequence[bool]) -> None:
        """Prepare for a group change; ``stays[r]`` is True if rank r stays. Called on every rank.

        Residuals are summed, replicas are made identical, and state that only leaving ranks hold is sent to staying
        ranks.
        """
        for table in self._sharded.tables:
            table.hand_over(stays)
        for each in self._tiles:
            each.hand_over(stays)
        self._reducer.reduction.end_step()
        self._owed.before_change()
        self._make_one()

    def enter_group(self) -> None:
        """Enter a new group: rebuild the plan and buckets, and drop state that only some ranks hold."""
        self._entering, self._stepped = True, None
        self._reducer.reduction.end_step()
        self.measure_examples(None, wanted=False)  # a loader of one rank asks again
        self.drift.entered()
        self._carried.enter_group()
        other_tail = self._control_size != self._context.consensus.control_size or self._statistics.meter.outdated
        if self._in_force.enter_group() or other_tail:
            self._reducer.rebuild()
        self._statistics.enter_group()
        self._reducer.enter_group()
        self._owed.enter_group()
        for table in self._sharded.tables:
            table.enter_group()
        for each in self._tiles:
            each.enter_group()

    def remember(self) -> Any:
        self._reducer.reduction.end_step()
        force = self._in_force
        self._asked_before, self._entering = force.asked, False
        if force.tuner is not None:
            force.tuner.remember()
        return self._carried.remember()

    def roll_back(self, remembered: Any) -> None:
        self._reducer.reduction.void()
        self._stepped = None
        self._in_force.roll_back(self._asked_before)
        self._carried.roll_back(remembered)

    def capture(self) -> Any:
        """Return accumulated gradients, the strategy's state, and the strategy if it is no longer the initial one."""
        drift = self.drift.capture()
        average = {"average": drift} if drift else {}
        return {**self._carried.capture(), **self._in_force.capture(), **self._owed.capture(), **average}

    def restore(self, tree: Any) -> None:
        if self._in_force.restore(tree):
            self._reducer.rebuild()
        for each in self._row_steps:
            each.recheck()
        self._owed.restore(tree)
        self.drift.restore(tree.get("average", {}))
        self._carried.restore(tree)

    @property
    def _may_switch(self) -> bool:
        """True if replicas are identical, or will be after the current step, so that the strategy may change."""
        return self.drift.average is None or not self.drift.on or self.drift.settled

    def _lay_out(self, trainable: Trainable) -> BucketLayout:
        """Return buckets laid out for the current parameters, strategy and group."""
        plan = self._in_force.take(switch=self._may_switch, entering=self._entering)
        self._stepped = None
        self._control_size = self._context.consensus.control_size
        if (known := self._statistics.examples) is not None:
            self._statistics.measure_in(ExampleNorms(self._module, trainable.params, known.every))
        self._statistics.rebuilt(len(trainable.groups))
        groups = trainable.groups if self._context.unit is None else local_groups(trainable.groups)
        layout = BucketLayout(groups, plan, self._control_size, self._in_force, self._statistics, self._tiles)
        if self._in_unit is not None:
            self._in_unit.adapt(layout.buckets)
        self.drift.adapt(plan.strategy.average)
        self.averages = plan.strategy.average is not None
        for each in self._tiles:
            each.adapt(plan, self.profile)
        self._owed.adapt(layout, [bucket.params for bucket in plan.buckets], self.profile.params)
        rows = {bucket.index: bucket for bucket in layout.buckets if isinstance(bucket, RowBucket)}
        self._in_force.set_row_buckets(rows)
        self._update_tables([bucket.table for bucket in rows.values()])
        return layout

    def _update_tables(self, tables: Sequence[TableGradient]) -> None:
        """Attach table gradients to the layers that use them, replacing the previous layout's."""
        for table in self._tables:
            table.close()
        self._tables = tables
        for each in self._row_steps:
            each.adapt(tables)
        layers = layers_by_parameter(self._module) if tables else {}
        for table in tables:
            table.adapt(layers[id(table.param)])
