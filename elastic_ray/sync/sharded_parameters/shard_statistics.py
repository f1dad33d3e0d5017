"""Statistics of a sharded model's gradients, measured while they are being scattered (torch).

A rank that owns rows receives their gradients from each rank in its shard group, and sums them. It therefore knows the
squared norms of these gradients and of their mean over all groups, in units of its own optimizer state. Sums over the
owners are exchanged when the ranks agree on the step after a backward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from elastic_ray.monitoring.gradient_measures import GradientNorms
from elastic_ray.sync.device_numbers import as_real, read, real_shape, with_steps_read
from elastic_ray.sync.engine.joint_optimizer import group_ranges, optimizers_of
from elastic_ray.sync.engine.trainable import Trainable
from elastic_ray.sync.preconditioners import (
    LEAST_PART,
    REFRESHED_EVERY,
    SETTLED_STEPS,
    compact,
    denominators,
    is_adam_like,
    squared_norm,
)
from elastic_ray.sync.sharded_parameters.fsdp_fields import scattered_params, units_of
from elastic_ray.sync.sharded_parameters.shard_collectives import ShardCollectives
from elastic_ray.sync.sharded_parameters.sharded_optimizer import ShardedOptimizer
from elastic_ray.sync.statistics.gradient_meter import GradientMeter
from elastic_ray.sync.statistics.gradient_statistics import GradientStatistics
from elastic_ray.sync.statistics.update_norms import with_update_norms

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.steps.step import LoaderStep


class RowDenominators:
    """Denominators that an Adam-like optimizer divides gradients by; a ``StatesSource`` for statistics.

    Each rank computes the denominators for the rows it owns. Only one number per parameter is exchanged, to compute the
    lower bound of the parameter's denominators.
    """

    idle = outdated = False  # denominators are computed before they are needed

    def __init__(self, optimizer: torch.optim.Optimizer, shards: ShardedOptimizer) -> None:
        self._optimizer, self._shards = optimizer, shards
        self.state: dict[int, Tensor] = {}  # factors of own rows by the parameter's position, but those of 1
        self._round: int | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer."""
        return self._optimizer.param_groups

    @property
    def adam_like(self) -> bool:
        """True if the optimizer divides gradients by a running estimate of their size."""
        return any(map(is_adam_like, optimizers_of(self._optimizer)))

    def invalidate(self) -> None:
        """Discard the denominators, because this rank owns different rows in a new group."""
        self.state, self._round = {}, None

    def due(self, step: int) -> bool:
        """True if denominators must be computed before the given step is measured; the same on all ranks."""
        fresh = step // REFRESHED_EVERY == self._round and step > SETTLED_STEPS
        return self.adam_like and not fresh

    @torch.no_grad()
    def refresh(self, step: int, add_up: Callable[[Sequence[float]], Sequence[float]], *, counts: bool = True) -> None:
        """Compute the denominators; called on every rank.

        Args:
            add_up: Sums numbers over all ranks.
            counts: Whether this rank's rows are included in the sums; True on only one owner of each row.
        """
        own, groups, params = self._shards.own, self._shards.groups, self._shards.params
        sizes: dict[int, Tensor] = {}
        states = with_steps_read([own.states[view] for view in own.views.values()])
        for (place, view), state in zip(own.views.items(), states, strict=True):
            options = self._optimizer.param_groups[groups[place]] if place in groups else {}
            size = denominators(state, options, view.dtype)
            if size is not None:
                sizes[place] = size.reshape(-1)
        counted = sizes if counts else {}
        squares = read([counted[each].square().sum() if each in counted else 0.0 for each in range(len(params))])
        self.state = {}
        for place, square in enumerate(add_up(squares)):
            if square > 0:
                size = sizes.get(place, as_real(params[place].local.new_empty(0)).reshape(-1))
                floor = LEAST_PART * math.sqrt(square / math.prod(real_shape(params[place].param)))
                self.state[place] = compact(torch.reciprocal(size.clamp(min=max(floor, torch.finfo(size.dtype).tiny))))
        self._round = step // REFRESHED_EVERY


class MovedRows:
    """Norms of optimizer updates, measured on each rank for the rows it owns and then summed over ranks.

    Args:
        meter: Meter that decides which updates are measured, in the same way on all ranks, and receives the norms.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, shards: ShardedOptimizer, meter: GradientMeter) -> None:
        self._optimizer, self._shards, self._meter = optimizer, shards, meter
        self._waiting: tuple[GradientNorms, list[float]] | None = None  # with squares of this rank's rows, by group

    def size(self, groups: int) -> int:
        """Return the number of values to send for ``groups`` parameter groups; the same on all ranks."""
        return 0 if self._meter.monitor.norms_every is None else 1 + groups

    def discard(self) -> None:
        """Discard the measured update, because rows have different owners in a new group."""
        self._waiting = None

    def measure(self, number: int, update: Callable[[], Any], *, alone: bool, counts: bool) -> Any:
        """Run an update and return its result; measure the update's norms if the gradient was measured."""
        optimizers, moved = optimizers_of(self._optimizer), self._meter.moved
        rows = self._rows(counts=counts)[group_ranges(optimizers)[number]]
        result, moved[number] = with_update_norms(optimizers[number], rows, update, whole=False)
        if len(moved) < len(optimizers):
            return result  # the others step after it
        norms = tuple(norm for each in sorted(moved) for norm in moved[each])
        moved.clear()
        found = self._meter.pop_unmoved()
        if found is None:
            return result
        if alone:
            self._meter.found_by_all(dataclasses.replace(found, updates=norms))
        else:
            self._waiting = found, [norm * norm for norm in norms]
        return result

    def _rows(self, *, counts: bool) -> list[list[Parameter]]:
        """Return the rows changed by the update on this rank, by parameter group."""
        rows: list[list[Parameter]] = [[] for _ in self._optimizer.param_groups]
        groups = self._shards.groups
        for place, view in self._shards.own.views.items() if counts else ():
            if place in groups and self._shards.params[place].local_grad is not None:
                rows[groups[place]].append(view)
        return rows

    def values(self, groups: int) -> list[float]:
        """Return 1 and the squared update norm of each parameter group, or only zeros if no update was measured."""
        if self._waiting is not None and len(self._waiting[1]) != groups:
            self._waiting = None  # the optimizer was given another group since
        if not self.size(groups) or self._waiting is None:
            return [0.0] * self.size(groups)
        return [1.0, *self._waiting[1]]

    def take(self, sums: Sequence[float], *, ranks: int) -> None:
        """Store the results of :meth:`values`, summed over `ranks` ranks, if all of these ranks measured the update."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and round(sums[0]) == ranks:
            norms, _ = waiting
            self._meter.found_by_all(dataclasses.replace(norms, updates=tuple(each**0.5 for each in sums[1:])))


class ShardStatistics:
    """Gradient statistics of one sharded model, measured while torch scatters its gradients."""

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        trainable: Trainable,
        optimizer: ShardedOptimizer,
        collectives: ShardCollectives,
        statistics: GradientStatistics,
        denominators: RowDenominators,
        moved: MovedRows,
    ) -> None:
        self._run, self._trainable, self._optimizer = run, trainable, optimizer
        self._collectives, self._statistics, self._denominators = collectives, statistics, denominators
        self._moved = moved
        self._units = units_of(module)
        self._places = {id(each.param): place for place, each in enumerate(optimizer.params)}
        self._groups: dict[int, int] = {}  # of the optimizer, by place, in the pass in progress
        self._step: LoaderStep | None = None
        self._micro = self._passes = 0
        self._open = True  # until the optimizer steps
        self._mixed = False  # passes of an accumulated step have added to each other
        self._measures = self._goes_on = False
        self.rebuilt()

    def rebuilt(self) -> None:
        """Reset the statistics, because the trainable parameters or requested measurements have changed."""
        self._statistics.rebuilt(len(self._trainable.groups))

    def enter_group(self) -> None:
        """Enter a group, and discard measurements made in the previous group."""
        if self._statistics.meter.outdated:
            self.rebuilt()
        self._statistics.enter_group()
        self._denominators.invalidate()
        self._moved.discard()
        self.discard()

    def discard(self) -> None:
        """Discard the current step's measurements, because the step is lost."""
        self._step, self._measures = None, False
        self._collectives.watch(None)

    def close(self) -> None:
        """Exclude later backward passes in the step (such as a GAN's other loss) from the statistics."""
        self._open = False

    @property
    def layout(self) -> tuple[int, bool]:
        """Values compared between all ranks: how many numbers are sent, and whether denominators are computed first."""
        return self._size, self._refreshes

    @property
    def _refreshes(self) -> bool:
        return self._measures and self._statistics.in_units and self._denominators.due(self._run.states.progress.steps)

    @property
    def _size(self) -> int:
        statistics, moved = self._statistics, self._moved.size(len(self._trainable.groups))
        return statistics.norms_size + statistics.mean_size + statistics.shared_size + moved

    # -- one backward pass ---------------------------------------------------------------------------------------------

    def start_pass(self, step: LoaderStep | None) -> None:
        """Start a backward pass."""
        ledger = self._run.ledger
        self._goes_on = self._measures = False
        if step is not None:
            self._groups = self._optimizer.groups
            if step is not self._step:
                self._start_step(step)
            elif step.micro != self._micro:
                self._statistics.carry()
                self._start_micro(step.micro)
            self._goes_on = self._passes > 0 and any(rows.is_used for rows in self._mean_rows())
            self._mixed = self._mixed or (self._goes_on and step.micro_steps > 1)
            self._passes += 1
            self._statistics.start_pass()
            self._measures = self._statistics.due and self._open and not ledger.failed and not ledger.replaying
        self._collectives.watch(self._scattered if self._measures else None)

    def _start_step(self, step: LoaderStep) -> None:
        self._step, self._mixed = step, False
        replicas = self._run.group.world_size
        self._statistics.start_step(step, self._run.states.progress.steps, replicas=replicas, exact=True, spacing=1)
        self._start_micro(step.micro)

    def _start_micro(self, micro: int) -> None:
        self._micro, self._passes, self._open = micro, 0, True

    def find_denominators(self) -> None:
        """Compute the denominators at the start of a pass, if they are due; called on every rank."""
        if self._refreshes:
            first = self._collectives.is_first_owner
            self._denominators.refresh(self._run.states.progress.steps, self._collectives.add_up, counts=first)
            self._statistics.noise.learn_kind()

    @torch.no_grad()
    def _scattered(self, number: int, parts: Tensor) -> None:
        """Measure each rank's gradients for this rank's rows in a sharded module, [ranks, elements]."""
        step, groups = self._step, self._groups
        assert step is not None, "only steps are measured"
        weights = [[step.weight(rank)] for rank in self._collectives.peers]
        shares = torch.tensor(
            weights, dtype=torch.promote_types(parts.dtype.to_real(), torch.float32), device=parts.device
        )
        start = 0
        for param, rows, padded in scattered_params(self._units[number]):
            place = self._places[id(param)]
            if rows and place in groups:
                before = self._optimizer.params[place].local_grad if self._goes_on else None
                self._statistics.add(
                    ScatteredRows(
                        place,
                        groups[place],
                        parts[:, start : start + rows],
                        shares,
                        None if before is None else before.reshape(-1),
                    ),
                    1.0,
                )
            start += padded
        assert start == parts.shape[1], "torch has scattered the gradients of other parameters"

    def _mean_rows(self) -> list[MeanRows]:
        """Return ``.grad`` for the rows that this rank owns, for each parameter."""
        groups = self._groups
        grads = [(place, each.local_grad) for place, each in enumerate(self._optimizer.params) if place in groups]
        return [MeanRows(place, groups[place], grad) for place, grad in grads if grad is not None]

    def end_pass(self, step: LoaderStep) -> None:
        """End a backward pass before gradients from earlier micro-steps are added to ``.grad``."""
        if self._measures and self._run.group.world_size == 1 and step.micro_steps > 1:
            for rows in self._mean_rows():
                self._statistics.add(rows, step.weight(0))

    def conclude_alone(self, step: LoaderStep) -> None:
        """Conclude the statistics for a pass in a group with one rank.

        In the last micro-step, ``.grad`` holds the sum over all micro-steps.
        """
        if not self._concludes or self._run.group.world_size > 1:
            return
        if step.micro_steps == 1:
            self._statistics.collect_alone(self._mean_rows(), 1.0)
            return
        mean = self._statistics.own_part_of_mean(self._mean_rows())
        self._conclude(step, read(self._statistics.local_norms()), mean)

    @property
    def _concludes(self) -> bool:
        return self._measures and self._step is not None and self._step.is_last_micro

    def values(self) -> list[float]:
        """Return this rank's measurements, to be summed over the ranks after the pass and passed to :meth:`take`."""
        statistics = self._statistics
        own = [0.0] * (statistics.norms_size + statistics.mean_size)
        if self._concludes:
            mean = statistics.own_part_of_mean(self._mean_rows())
            counted = self._collectives.is_first_owner
            own = [*read(statistics.local_norms()), *(mean if counted else [0.0] * len(mean))]
        first, moved = self._run.group.rank == 0, self._moved.values(len(self._trainable.groups))
        return [*own, *(statistics.shared_values() if first else [0.0] * statistics.shared_size), *moved]

    def take(self, sums: Sequence[float], *, counts: bool) -> None:
        """Store the results of :meth:`values`, summed over all ranks.

        Args:
            counts: Whether the step's gradients are complete; if not, rank 0's values and update norms are ignored.
        """
        norms, mean = self._statistics.norms_size, self._statistics.norms_size + self._statistics.mean_size
        shared = mean + self._statistics.shared_size
        if counts:
            self._statistics.set_shared(list(sums[mean:shared]), first=self._run.group.rank == 0)
            self._moved.take(sums[shared:], ranks=self._run.group.world_size)  # newer than what rank 0 has told
        if self._concludes and self._step is not None:
            self._conclude(self._step, sums[:norms], sums[norms:mean])

    def _conclude(self, step: LoaderStep, norms: Sequence[float], mean: Sequence[float]) -> None:
        self._statistics.set_mean(mean, first=self._run.group.rank == 0)
        if self._mixed and self._run.group.world_size > 1:
            return  # what arrives of a pass has nothing of the passes before it
        self._statistics.collect(step, norms, grad_scale=1.0, goes_on=self._goes_on and step.micro_steps == 1)

    def measured(self, number: int, update: Callable[[], Any]) -> Any:
        """Run optimizer ``number``'s ``update``, measuring the norms of the change; return the update's result."""
        alone, counts = self._run.group.world_size == 1, self._collectives.is_first_owner
        return self._moved.measure(number, update, alone=alone, counts=counts)


class _Rows:
    """Rows of one parameter."""

    sliced = True

    def __init__(self, place: int, group: int) -> None:
        self.index, self.group = place, group

    def preconditioner(self, source: Any) -> Tensor | None:
        """Return the denominators for the rows' gradients, [elements]; ``source`` is ``RowDenominators``."""
        found: Tensor | None = source.state.get(self.index)
        return found


class MeanRows(_Rows):
    """Some of the rows of a parameter's mean gradient in a step."""

    def __init__(self, place: int, group: int, grad: Tensor) -> None:
        super().__init__(place, group)
        self._grad = as_real(grad.detach()).reshape(-1)

    @property
    def is_used(self) -> bool:
        """True if any element of these rows is not zero."""
        return bool(self._grad.any())

    def squared_norm(self, preconditioner: Tensor | None) -> Tensor:
        """Return the rows' squared norm after multiplication by the preconditioner, as a scalar tensor."""
        return squared_norm(self._grad, preconditioner)


class ScatteredRows(_Rows):
    """Gradients for some rows from all ranks, before they are summed.

    Args:
        parts: Each rank's gradient times its share in the mean, [ranks, elements].
        shares: Each rank's share, [ranks, 1], in float32 or wider.
        before: Content of ``.grad`` from an earlier backward pass of the step, [elements]; None if there was no such
            pass.
    """

    def __init__(self, place: int, group: int, parts: Tensor, shares: Tensor, before: Tensor | None) -> None:
        super().__init__(place, group)
        self._parts, self._roots = as_real(parts).flatten(1), shares.sqrt()
        self._before = None if before is None else as_real(before).reshape(-1)

    def squared_norm(self, preconditioner: Tensor | None) -> Tensor:
        """Return the sum over ranks of ``share * ||gradient||^2`` as a scalar tensor; shares of 0 are skipped."""
        gradients = self._parts * self._roots.reciprocal().nan_to_num(posinf=0.0)
        if self._before is not None:
            gradients += self._before * self._roots
        if preconditioner is not None:
            gradients *= preconditioner
        flat = gradients.view(-1)
        return torch.dot(flat, flat)
