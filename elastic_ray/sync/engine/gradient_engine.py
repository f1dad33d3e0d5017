"""Gradients of one model as its strategy says: every rank has the whole mean, and applies it to a whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from elastic_ray.sync.builders import StrategyBuilder
from elastic_ray.sync.choosing.explanation import StrategyTable
from elastic_ray.sync.engine.carried_gradients import CarriedGradients
from elastic_ray.sync.engine.context import SyncContext
from elastic_ray.sync.engine.layout import BucketLayout
from elastic_ray.sync.engine.model_profile import layers_by_parameter, profile_of
from elastic_ray.sync.engine.noise import NoiseTracker
from elastic_ray.sync.engine.reducer import GradientReducer
from elastic_ray.sync.engine.row_steps import RowSteps
from elastic_ray.sync.engine.trainable import Trainable
from elastic_ray.sync.operations.factory import make_operation
from elastic_ray.sync.operations.row_bucket import RowBucket
from elastic_ray.sync.operations.table_gradient import TableGradient
from elastic_ray.sync.plan import SyncPlan
from elastic_ray.sync.profile import ModelProfile
from elastic_ray.sync.switching.strategy_in_force import StrategyInForce


class GradientEngine:
    """See the module's text, and ``GradientSync``, which this is.

    Its state are the gradients that user code adds up over several steps, the present strategy, and what operations
    keep from step to step.

    Args:
        context: the run.
        module: the model.
        trainable: its trainable parameters.
        optimizer: steps them.
        builder: of the strategy.
        noise: takes statistics.
        grad_scale: AMP's present loss scale, 1 without AMP.
        number: of the model, in the order in which the loop wraps them.
        check_finite: whether to find out on which ranks gradients are NaN or infinite.

    Raises:
        StrategyError: the strategy cannot be carried out for this model and optimizer.
    """

    def __init__(
        self,
        context: SyncContext,
        module: torch.nn.Module,
        trainable: Trainable,
        optimizer: torch.optim.Optimizer,
        builder: StrategyBuilder,
        noise: NoiseTracker,
        grad_scale: Callable[[], float],
        number: int,
        *,
        check_finite: bool,
    ) -> None:
        self._context = context
        self._module = module
        self._trainable = trainable
        self._optimizer = optimizer
        self._in_force = StrategyInForce(context, self, builder)
        self._carried = CarriedGradients(context, optimizer)
        self._tables: Sequence[TableGradient] = ()
        self._row_steps = RowSteps(optimizer)
        self._reducer = GradientReducer(
            trainable, self._lay_out, self._carried, context, noise, grad_scale, number, check_finite=check_finite
        )

    @property
    def plan(self) -> SyncPlan:
        """What is carried out at present."""
        return self._in_force.plan

    @property
    def strategy_key(self) -> str | None:
        """Tells strategies apart of which step times are not to be mixed; None while one is being chosen."""
        return self._in_force.key

    @property
    def profile(self) -> ModelProfile:
        """What a strategy's planner needs to know of the model."""
        return profile_of(self._module, self._trainable.groups, self._optimizer)

    @property
    def device(self) -> torch.device:
        """Of its gradients."""
        return self._trainable.params[0].device

    def check(self, plan: SyncPlan) -> None:
        """Raise StrategyError where a plan cannot be carried out."""
        for bucket in plan.buckets:
            make_operation(bucket)

    @property
    def nonfinite_ranks(self) -> Sequence[int] | None:
        """Ranks whose gradients were NaN or infinite when this step reduced them; None where all were finite."""
        return self._reducer.nonfinite_ranks

    @property
    def is_open(self) -> bool:
        """Whether gradients wait for the optimizer."""
        return self._carried.is_open

    @property
    def local(self) -> bool:
        """Whether ``no_sync`` has left them unreduced."""
        return self._carried.local

    def set_strategy(self, strategy: object) -> None:
        """Go on with another strategy from the next step on. Every rank must ask for the same in the same step.

        Args:
            strategy: as of ``AdaptiveDataParallel(strategy=...)``.

        Raises:
            StrategyError, TypeError: there is no such strategy, or it cannot be carried out for this model.
        """
        self._in_force.ask(strategy)

    def explain_strategy(self) -> StrategyTable:
        """What is done with the gradients, and why."""
        return self._in_force.explain()

    def before_forward(self) -> None:
        """Take in what was unfrozen, and a strategy that was asked for."""
        self._in_force.before_forward()
        self._reducer.follow(changed=self._in_force.pending)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to this rank's gradients."""
        return self._reducer.no_sync()

    def before_update(self) -> None:
        """What backward adds from here on is another loss's."""
        self._reducer.close()
        self._in_force.stepped()

    def applied(self) -> None:
        """Nothing is left to carry, should the step be lost from here on."""
        self._carried.note_applied()

    def rebuild(self) -> None:
        """Lay out buckets for other parameters."""
        self._reducer.rebuild()

    def enter_group(self) -> None:
        """What only some of its ranks hold counts no more; the plan follows the group."""
        self._carried.enter_group()
        if self._in_force.enter_group():
            self._reducer.rebuild()

    def remember(self) -> Any:
        """What a step needs to be undone."""
        self._in_force.remember()
        return self._carried.remember()

    def roll_back(self, remembered: Any) -> None:
        """Undo a lost step."""
        self._reducer.void()
        self._in_force.roll_back()
        self._carried.roll_back(remembered)

    def capture(self) -> Any:
        """Carried gradients, and the strategy where it is another than at the beginning."""
        return {**self._carried.capture(), **self._in_force.capture()}

    def restore(self, tree: Any) -> None:
        """Take over a captured state. The strategy of a run that began with another one stays behind with it."""
        if self._in_force.restore(tree):
            self._reducer.rebuild()
        self._carried.restore(tree)

    def _lay_out(self, trainable: Trainable) -> BucketLayout:
        """Buckets for the present parameters, strategy and group."""
        plan = self._in_force.take()
        layout = BucketLayout(trainable.groups, plan, self._context.consensus.control_size, self._in_force)
        rows = {bucket.index: bucket for bucket in layout.buckets if isinstance(bucket, RowBucket)}
        self._in_force.follow_rows(rows)
        self._follow_tables([bucket.table for bucket in rows.values()])
        return layout

    def _follow_tables(self, tables: Sequence[TableGradient]) -> None:
        """Have tables know the layers that use them, in place of those of the layout before."""
        for table in self._tables:
            table.close()
        self._tables = tables
        self._row_steps.follow(tables)
        layers = layers_by_parameter(self._module) if tables else {}
        for table in tables:
            table.follow(layers[id(table.param)])
