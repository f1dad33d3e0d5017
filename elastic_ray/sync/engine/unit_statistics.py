"""Statistics and strategies for a model divided among the workers of a unit, e.g. for tensor parallelism.

Estimates are linear in the squared norms, so each worker computes them for its own part, and the unit adds them up. A
parameter held by several workers (same name, same gradient) is counted only on the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.monitoring.monitor import Monitor
from elastic_ray.state.layout import digest
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.device_numbers import as_real, local, read
from elastic_ray.sync.operations.buckets import Bucket
from elastic_ray.sync.plan import BucketPlan, ParamInfo, SyncPlan
from elastic_ray.sync.spec import Owner, Reduce

if TYPE_CHECKING:
    from elastic_ray.communication.unit_group import UnitGroup
    from elastic_ray.sync.operations.bucket_operation import GradientBucket
    from elastic_ray.sync.statistics.gradient_statistics import GradientStatistics

_CLOSE = 1e-4
_SIGNATURE = 4
_EXACT = torch.float64
_NOTHING = Monitor()


class UnitStatistics:
    """Statistics of a model's backward passes on one worker of a unit (workers that share a replica)."""

    def __init__(self, unit: UnitGroup, module: torch.nn.Module, statistics: GradientStatistics) -> None:
        self._unit, self._module, self._statistics = unit, module, statistics
        self._buckets: Sequence[GradientBucket] = ()
        self._left_out: list[str] | None = None

    def adapt(self, buckets: Sequence[GradientBucket]) -> None:
        """Measure the gradients in ``buckets``, except for parameters counted by other workers in the unit."""
        self._buckets, self._left_out = buckets, self._statistics.noise.counted_elsewhere
        left_out = {id(p) for name, p in self._module.named_parameters() if name in (self._left_out or ())}
        for bucket in buckets:
            if isinstance(bucket, Bucket):
                bucket.count_elsewhere(left_out)

    def before_forward(self) -> None:
        """Update which parameters are excluded because other workers in the unit count them, if this has changed."""
        if self._left_out is not self._statistics.noise.counted_elsewhere:
            self.adapt(self._buckets)

    def due(self) -> float:
        """Return the number of parameter groups if this step was measured but not summed yet, otherwise 0."""
        statistics = self._statistics
        return float(statistics.noise.groups if statistics.due and not statistics.added_up else 0)

    def add_up(self, due: Sequence[float], needed_by: Sequence[str]) -> None:
        """Sum the measurements from the unit's workers after a step's gradients have been averaged.

        Args:
            needed_by: Names of the settings that require the statistics; empty if no setting does.

        Raises StrategyError if a setting needs the statistics, but workers have different numbers of parameter groups.
        """
        statistics, unlike = self._statistics, len(set(due)) > 1
        statistics.added_up = True
        needed = [*needed_by, *(["AdaptiveDataParallel(monitor=)"] if statistics.meter.monitor != _NOTHING else [])]
        if unlike and all(due) and needed:
            raise StrategyError(
                f"{needed[0]} needs gradient statistics, for which optimizers on all workers of a unit must "
                f"have the same number of parameter groups, but they have {[round(each) for each in due]}; add empty "
                "groups where "
                'a worker holds none of their parameters, or use scaling_rule="none", "linear", "sqrt" or "legw" and a '
                "fixed batch"
            )
        if unlike or not all(due):
            statistics.drop_parts()
            return
        rows = self._unit.gather([float(statistics.noise.looks), *statistics.part()])
        statistics.combine_parts([row[1:] for row in rows])
        if any(row[0] for row in rows):
            self._poll()

    def _poll(self) -> None:
        """Determine which of this worker's parameters are also held by earlier workers in the unit."""
        own = [number for signature in self._signatures() for number in signature]
        rows = _gather_all(self._unit, own)
        noise, mine = self._statistics.noise, self._unit.place.position
        by_worker = [[tuple(row[i : i + _SIGNATURE]) for i in range(0, len(row), _SIGNATURE)] for row in rows]
        earlier: dict[float, list[tuple[float, ...]]] = {}
        for signature in (each for signatures in by_worker[:mine] for each in signatures):
            earlier.setdefault(signature[0], []).append(signature)
        names = [name for name, _ in self._held()]
        elsewhere = [
            name
            for name, signature in zip(names, by_worker[mine], strict=False)
            if any(_alike(signature, other) for other in earlier.get(signature[0], ()))
        ]
        if not all(math.isfinite(number) for row in rows for number in row):
            return  # an overflow, of which nothing was estimated
        looks = any(each[1] and not each[2] for signatures in by_worker for each in signatures)
        if not self._unit.agree(elsewhere == noise.counted_elsewhere):
            self._statistics.drop_parts()
        noise.leave_out(elsewhere, looks=looks)

    def _held(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters in buckets, with their names."""
        held = {id(getattr(p, "whole", p)) for bucket in self._buckets for p in bucket.params}
        return ((name, p) for name, p in self._module.named_parameters() if id(p) in held)

    def _signatures(self) -> Iterator[tuple[float, float, float, float]]:
        """Yield a signature for each parameter: its name's digest, and the size, norm and sum of its mean gradient."""
        held = list(self._held())
        grads = [None if p.grad is None else as_real(local(p.grad).detach()) for _, p in held]
        norms = read([0.0 if grad is None else torch.linalg.vector_norm(grad, dtype=_EXACT) for grad in grads])
        sums = read([0.0 if grad is None else grad.sum(dtype=_EXACT) for grad in grads])
        for (name, p), norm, total in zip(held, norms, sums, strict=True):
            yield float(digest(name)), float(local(p).numel()), norm, total


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """True if two workers' signatures have the same size and non-zero gradient, so the parameter is the same."""
    (_, size, norm, total), (_, other_size, other_norm, other_total) = one, other
    near = _CLOSE * norm * math.sqrt(size)
    return (
        size == other_size
        and norm > 0
        and math.isclose(norm, other_norm, rel_tol=_CLOSE)
        and (abs(total - other_total) <= near)
    )


def _gather_all(unit: UnitGroup, values: Sequence[float]) -> list[list[float]]:
    """Return the values from all workers in the unit, padded with zeros because their numbers may differ."""
    most = round(max(row[0] for row in unit.gather([float(len(values))])))
    return unit.gather([*values, *[0.0] * (most - len(values))])


def why_not_in_units(plan: SyncPlan, params: Sequence[ParamInfo], held: Set[str]) -> str:
    """Return why a model divided within a unit cannot use ``plan``, with a suggestion; empty if it can.

    Args:
        held: Names of parameters held by several workers in the unit, which must stay equal on these workers.
    """
    average = plan.strategy.average
    if average is not None and average.give_back:
        return "the workers of a unit make the same steps: leave give_back=True out"
    if average is not None and average.algorithm == "pair":
        return "each worker would pull its part from another unit at another time: use 'local_sgd' or 'sma'"
    if plan.tiles is not None:
        return "divide the optimizer state within the unit (torch's fully_shard), or leave strategy= out"
    mixed = list[str]()
    for bucket in plan.buckets:
        if not isinstance(bucket.sync, Reduce | Owner):
            return "rows are not exchanged by parts: use layers without sparse=True, or leave strategy= out"
        if isinstance(bucket.sync, Reduce) and bucket.sync.wire.compresses:
            mixed += _mixed(bucket, params, held)
    if not mixed:
        return ""
    return (
        f"several workers of the unit hold {', '.join(mixed[:3])}, and would round it differently, so that it drifts "
        "apart: use 'bf16' or 'fp16', or 'powersgd' where these are vectors, which it does not compress"
    )


def _mixed(bucket: BucketPlan, params: Sequence[ParamInfo], held: Set[str]) -> list[str]:
    """Return the names of parameters in ``held`` whose compression depends on other parameters in the bucket."""
    exact = isinstance(bucket.sync, Reduce) and bool(bucket.sync.wire.rank)  # for vectors
    own = [params[i] for i in bucket.params]
    return [p.name for p in own if not held.isdisjoint(p.names) and not (exact and len(p.shape) < 2)]


def held_by_several(unit: UnitGroup, module: torch.nn.Module) -> frozenset[str]:
    """Return the names of parameters fully held by several workers in a unit; called on each of its workers."""
    names = [name for name, p in module.named_parameters() if not _is_divided(p, unit.place.size)]
    rows = _gather_all(unit, [float(digest(name)) for name in names])
    elsewhere = {number for at, row in enumerate(rows) if at != unit.place.position for number in row}
    return frozenset(name for name in names if float(digest(name)) in elsewhere)


def _is_divided(param: Any, workers: int) -> bool:
    """True if each worker in the unit holds its own elements of the parameter."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None or mesh.size() != workers:
        return False
    return all(each.is_shard() or size == 1 for each, size in zip(param.placements, mesh.shape, strict=True))
