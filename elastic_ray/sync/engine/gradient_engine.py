"""Gradients of one model as its strategy says: every rank has the whole mean, and applies it to a whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from elastic_ray.sync.builders import StrategyBuilder
from elastic_ray.sync.engine.carried_gradients import CarriedGradients
from elastic_ray.sync.engine.context import SyncContext
from elastic_ray.sync.engine.layout import BucketLayout
from elastic_ray.sync.engine.model_profile import layers_by_parameter, profile_of
from elastic_ray.sync.engine.noise import NoiseTracker
from elastic_ray.sync.engine.reducer import GradientReducer
from elastic_ray.sync.engine.trainable import Trainable
from elastic_ray.sync.operations.row_bucket import RowBucket
from elastic_ray.sync.operations.table_gradient import TableGradient
from elastic_ray.sync.plan import SyncPlan, lower
from elastic_ray.sync.profile import ModelProfile, Topology
from elastic_ray.sync.spec import Strategy


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
        self._builder = builder
        self._wanted: Strategy | None = None
        self._plan = self._lower(builder.build(self._profile(), Topology()), Topology())
        self._given = self._plan.strategy.to_json()
        self._carried = CarriedGradients(context, optimizer)
        self._tables: Sequence[TableGradient] = ()
        self._reducer = GradientReducer(
            trainable, self._lay_out, self._carried, context, noise, grad_scale, number, check_finite=check_finite
        )

    @property
    def plan(self) -> SyncPlan:
        """What is carried out at present."""
        return self._plan

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

    def switch(self, strategy: Strategy) -> None:
        """Go on with another strategy from the next step on. Every rank must ask for it in the same step.

        Raises:
            StrategyError: it cannot be carried out for this model and optimizer.
        """
        self._lower(strategy, self._topology())
        self._wanted = strategy

    def before_forward(self) -> None:
        """Take in what was unfrozen, and a strategy that was asked for."""
        self._reducer.follow(changed=self._wanted is not None)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to this rank's gradients."""
        return self._reducer.no_sync()

    def before_update(self) -> None:
        """What backward adds from here on is another loss's."""
        self._reducer.close()

    def applied(self) -> None:
        """Nothing is left to carry, should the step be lost from here on."""
        self._carried.note_applied()

    def rebuild(self) -> None:
        """Lay out buckets for other parameters."""
        self._reducer.rebuild()

    def enter_group(self) -> None:
        """What only some of its ranks hold counts no more; the plan follows the group."""
        self._carried.enter_group()
        if self._lower(self._plan.strategy, self._topology()).digest != self._plan.digest:
            self._reducer.rebuild()

    def remember(self) -> Any:
        """What a step needs to be undone."""
        return self._carried.remember()

    def roll_back(self, remembered: Any) -> None:
        """Undo a lost step."""
        self._reducer.void()
        self._carried.roll_back(remembered)

    def capture(self) -> Any:
        """Carried gradients, and the strategy where it is another than at the beginning."""
        strategy = self._plan.strategy.to_json()
        switched = {} if strategy == self._given else {"given": self._given, "strategy": strategy}
        return {**self._carried.capture(), **switched}

    def restore(self, tree: Any) -> None:
        """Take over a captured state. The strategy of a run that began with another one stays behind with it."""
        strategy = tree.get("strategy", self._given)
        if tree.get("given", self._given) == self._given and strategy != self._plan.strategy.to_json():
            self._wanted = Strategy.from_json(strategy)
            self._reducer.rebuild()
        self._carried.restore(tree)

    def _profile(self) -> ModelProfile:
        return profile_of(self._module, self._trainable.groups, self._optimizer)

    def _topology(self) -> Topology:
        return Topology(nodes=tuple(self._context.group.nodes))

    def _lower(self, strategy: Strategy, topology: Topology) -> SyncPlan:
        return lower(strategy, self._profile(), topology)

    def _lay_out(self, trainable: Trainable) -> BucketLayout:
        """Buckets for the present parameters, strategy and group."""
        strategy, self._wanted = self._wanted or self._plan.strategy, None
        self._plan = self._lower(strategy, self._topology())
        layout = BucketLayout(trainable.groups, self._plan, self._context.consensus.control_size)
        self._follow_tables([bucket.table for bucket in layout.buckets if isinstance(bucket, RowBucket)])
        return layout

    def _follow_tables(self, tables: Sequence[TableGradient]) -> None:
        """Have tables know the layers that use them, in place of those of the layout before."""
        for table in self._tables:
            table.close()
        self._tables = tables
        layers = layers_by_parameter(self._module) if tables else {}
        for table in tables:
            table.follow(layers[id(table.param)])
