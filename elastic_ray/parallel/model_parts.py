"""Builder of the components that keep a wrapped model, replicated or sharded, synchronised (torch)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.parallel.patches import complete
from elastic_ray.run.registry import HookPoint
from elastic_ray.state.tree import ModuleState, Stateful
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.engine.gradient_engine import GradientEngine
from elastic_ray.sync.engine.joint_optimizer import (
    JointDenominators,
    JointOptimizer,
    group_ranges,
    optimizers_of,
)
from elastic_ray.sync.engine.trainable import Trainable, TrainedState, is_elementwise
from elastic_ray.sync.optimizer_tiles.tiled_optimizer import TiledOptimizer
from elastic_ray.sync.sharded.model_tables import ModelTables
from elastic_ray.sync.statistics.gradient_statistics import GradientStatistics
from elastic_ray.sync.statistics.noise import NoiseTracker
from elastic_ray.sync.statistics.update_norms import with_update_norms
from placement.goodput.model import NoiseScale

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.sync.sharded_parameters.sharded_gradients import ShardedGradients


def joined(module: torch.nn.Module, optimizer: Any) -> tuple[list[torch.optim.Optimizer], torch.optim.Optimizer]:
    """Return a model's optimizers as a list, and one optimizer that represents all of them.

    Raises:
        TypeError: An optimizer is missing, or of the wrong type.
        ValueError: Several optimizers update the same parameter.
    """
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in given:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, or a list of several, but got {type(each).__name__}; "
                "AdaptiveDataParallel(model, optimizer) needs both"
            )
        complete(each)
    if not given:
        raise TypeError("optimizer must be a torch.optim.Optimizer, or a list of several, but got an empty list")
    names = {id(p): name for name, p in module.named_parameters()}
    stepped: dict[int, int] = {}
    for number, each in enumerate(given):
        for p in (p for group in each.param_groups for p in group["params"]):
            if stepped.setdefault(id(p), number) != number:
                raise ValueError(
                    f"each parameter must be stepped by one optimizer, but {names.get(id(p), 'one')} is in optimizer "
                    f"{stepped[id(p)]} and in optimizer {number} of the list: give each optimizer parameters of its "
                    "own; parameters that two losses train together belong to one optimizer, which steps for the sum "
                    "of the losses"
                )
    return given, given[0] if len(given) == 1 else JointOptimizer(given)


def schedulers_of(given: Any, optimizers: Sequence[torch.optim.Optimizer]) -> list[list[Any]]:
    """Return a list of schedulers for each optimizer; the first also has those of unlisted optimizers."""
    found: list[list[Any]] = [[] for _ in optimizers]
    places = {id(each): number for number, each in enumerate(optimizers)}
    for scheduler in given if isinstance(given, (list, tuple)) else [given]:
        if scheduler is not None:
            found[places.get(id(getattr(scheduler, "optimizer", None)), 0)].append(scheduler)
    return found


def joint_noise(
    whole: NoiseScale | None, parts: Sequence[tuple[Sequence[NoiseScale | None], int]]
) -> NoiseScale | None:
    """Return the noise scale of a model whose optimizers measure gradients in different units.

    Return None before the first estimate.

    Each optimizer's parameters are weighted by their number of elements n. Their gradients are normalised so that the
    gradient of one batch has the squared norm n, as Adam's preconditioned gradient does::

        sqr = sum n_i sqr_i / (sqr_i + var_i),    var = sum n_i var_i / (sqr_i + var_i)

    Args:
        whole: Noise scale over all parameters, returned if the model has only one optimizer.
        parts: For each optimizer, the noise scales of its parameter groups and the number of elements it updates.
    """
    if len(parts) == 1 or whole is None:
        return whole
    sqr = var = 0.0
    for groups, elements in parts:
        own = math.fsum(each.sqr for each in groups if each is not None)
        noise = math.fsum(each.var for each in groups if each is not None)
        if own + noise > 0:
            sqr, var = sqr + elements * own / (own + noise), var + elements * noise / (own + noise)
    return NoiseScale(sqr=sqr, var=var) if var > 0 else None


@dataclasses.dataclass(frozen=True, slots=True)
class KeptModel:
    """Components that keep one model synchronised on all ranks.

    Attributes:
        optimizers: For each optimizer, the object that agrees with the other ranks on updates and applies them.
        measured: For each optimizer, a function that runs an update and measures how far it moves the parameters.
    """

    sync: GradientEngine | ShardedGradients
    optimizers: Sequence[Any]
    measured: Sequence[Callable[[Callable[[], Any]], Any]]
    model_state: Stateful
    optimizer_states: Sequence[Stateful]


class ModelParts:
    """Builder of the components for one wrapped model, replicated or sharded."""

    def __init__(
        self,
        run: Run,
        module: torch.nn.Module,
        trainable: Trainable,
        optimizer: torch.optim.Optimizer,
        statistics: GradientStatistics,
        number: int,
        tables: ModelTables,
    ) -> None:
        self._run, self._module, self._trainable, self._optimizer = run, module, trainable, optimizer
        self._statistics, self._number, self._tables = statistics, number, tables

    def replicated(
        self, builder: Any, tracker: NoiseTracker, grad_scale: Callable[[], float], *, check_finite: bool, scaler: Any
    ) -> KeptModel:
        """Return the components for a model replicated on each rank; ``grad_scale`` returns AMP's loss scale."""
        run, module, optimizer = self._run, self._module, self._optimizer
        optimizers = optimizers_of(optimizer)
        ranges = group_ranges(optimizers) if len(optimizers) > 1 else [None]
        parts = [
            TiledOptimizer(run, module, each, self._number, groups)
            for each, groups in zip(optimizers, ranges, strict=True)
        ]
        tracker.source = JointDenominators(parts) if len(parts) > 1 else parts[0].denominators
        sync = GradientEngine(
            run,
            module,
            self._trainable,
            optimizer,
            builder,
            self._statistics,
            grad_scale,
            self._number,
            check_finite=check_finite,
            scaler=scaler,
            tables=self._tables,
            tiles=parts,
        )
        run.registry.add_hook(HookPoint.REPLACED, sync.let_go)
        states = [
            TrainedState(
                each, self._trainable, sync.rebuild, None if number else sync, tiles, in_unit=run.unit is not None
            )
            for number, (each, tiles) in enumerate(zip(optimizers, parts, strict=True))
        ]
        unit, meter = run.unit, self._statistics.meter

        def measured(number: int, update: Callable[[], Any]) -> Any:
            groups = self._trainable.groups[group_ranges(optimizers)[number]]
            if unit is not None:
                elsewhere = set(tracker.counted_elsewhere or ())
                named = {id(p) for name, p in module.named_parameters() if name in elsewhere}
                groups = [[p for p in group if id(p) not in named] for group in groups]
            whole = not parts[number].divided
            result, meter.moved[number] = with_update_norms(optimizers[number], groups, update, whole=whole)
            if len(meter.moved) == len(parts):  # by now each has stepped
                norms = [norm for number in range(len(parts)) for norm in meter.moved[number]]
                meter.moved.clear()
                if unit is not None:
                    norms = [math.hypot(*workers) for workers in zip(*unit.gather(norms), strict=True)]
                meter.updated(tuple(norms))
            return result

        each_measured = [functools.partial(measured, number) for number in range(len(parts))]
        return KeptModel(sync, parts, each_measured, ModuleState(module), states)

    def sharded(self) -> KeptModel:
        """Return the components for a sharded model.

        Raises:
            ValueError: Modules of the model were sharded with different values of ``shard_size``.
            StrategyError: The model also has a sharded table, its optimizer is not element-wise, or parameters or
                settings of its sharded modules were replaced.
        """
        # Torch's side of it takes a second to load, which models that are not sharded need not wait for.
        from elastic_ray.sync.sharded_parameters.fsdp_fields import check_places
        from elastic_ray.sync.sharded_parameters.model_checks import shard_size_of
        from elastic_ray.sync.sharded_parameters.model_state import ShardedModelState, StateDicts
        from elastic_ray.sync.sharded_parameters.shard_collectives import ShardCollectives
        from elastic_ray.sync.sharded_parameters.shard_statistics import MovedRows, RowDenominators, ShardStatistics
        from elastic_ray.sync.sharded_parameters.sharded_gradients import ShardedGradients
        from elastic_ray.sync.sharded_parameters.sharded_optimizer import ShardedOptimizer

        if self._tables:
            raise StrategyError(
                "a ShardedEmbedding in a model that is sharded (elastic_ray.fully_shard) is not supported: use "
                "torch.nn.Embedding, whose rows fully_shard divides among the ranks as well"
            )
        if unfit := [type(each).__name__ for each in optimizers_of(self._optimizer) if not is_elementwise(each)]:
            raise StrategyError(
                f"{unfit[0]} cannot step a sharded model: each rank steps its own rows, which is "
                "right only where an element's update depends on no other element. Torch's SGD, Adam, AdamW, NAdam, "
                "RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop and ASGD are so"
            )
        run, module, optimizer = self._run, self._module, self._optimizer
        check_places(module)
        collectives = ShardCollectives(run, self._number, shard_size_of(module))
        shards = ShardedOptimizer(run, module, optimizer, self._number, collectives)
        denominators = RowDenominators(optimizer, shards)
        self._statistics.noise.source = denominators
        moved = MovedRows(optimizer, shards, self._statistics.meter)
        statistics = ShardStatistics(
            run, module, self._trainable, shards, collectives, self._statistics, denominators, moved
        )
        sync = ShardedGradients(run, module, self._trainable, shards, collectives, statistics, self._number)
        StateDicts(module, shards)
        trained = TrainedState(optimizer, self._trainable, sync.rebuild, sync, shards)
        measured = [functools.partial(statistics.measured, number) for number in range(len(shards.parts))]
        return KeptModel(sync, shards.parts, measured, ShardedModelState(module, shards), [trained])
