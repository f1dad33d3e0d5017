"""Measurement of one model's gradient noise scale during training (torch; see ``noise_scale``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from elastic_ray.batch.reports import NoiseSignal
from elastic_ray.batch.scaling_rules import step_gain
from elastic_ray.sync.operations.bucket_operation import MeasuredGradient
from elastic_ray.sync.preconditioners import BucketPreconditioner, is_adam_like
from elastic_ray.sync.statistics.noise_scale import SmoothedNoise, estimate_groups
from placement.goodput.model import NoiseScale

if TYPE_CHECKING:
    from elastic_ray.steps.step import LoaderStep

# Statistics are smoothed over many steps, so after the first ones a sample of the steps is enough.
_DENSE_STEPS = 16
_EVERY = 4


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """Estimates from a backward pass that will count once the optimizer has applied its gradients."""

    estimates: tuple[NoiseScale, ...]  # raw noise scale of each group
    step: LoaderStep
    replicas: int
    preconditioned: bool  # whether norms are in the optimizer's units


class StatesSource(Protocol):
    """Protocol for a view of an optimizer's ``param_groups`` and ``state``, used to compute statistics."""

    @property
    def idle(self) -> bool:
        """True if the optimizer itself holds the full state."""

    @property
    def state(self) -> Mapping[Any, Any]:
        """Optimizer state, keyed by parameter."""

    @property
    def adam_like(self) -> bool:
        """True if the optimizer divides gradients by a running estimate of their size."""

    @property
    def outdated(self) -> bool:
        """True if nothing can be measured until missing state is gathered; the same on all ranks."""


class NoiseTracker:
    """Tracker of the gradient noise scale of each parameter group, smoothed over steps.

    Rank 0 makes the measurements, and its results are sent with the next gradient reduction. One step later, all ranks
    can therefore scale their learning rates by exactly the same numbers. Steps not applied by the optimizer (because
    AMP found an overflow) do not count.

    Args:
        optimizer: Optimizer with the state that preconditions gradients, if it is Adam-like.
        groups: Number of parameter groups.
        optimizers: Number of the model's optimizers.

    Attributes:
        shared_size: Number of values returned from :meth:`shared_values`.
        progress: Scale-invariant progress, in steps at the initial batch.
        held_factors: Factors of the latest step's learning rates, per optimizer and parameter group; empty if the rates
            do not depend on the noise.
        adam_steps: For each optimizer whose moments depend on the batch: number of steps, their equivalent at the
            initial batch by beta2, noise in the second moments (see ``remembered``), and the equivalent by beta1.
        adam_like: Whether the optimizer is Adam-like; None before its state shows this.
        counted_elsewhere: Names of parameters counted by other workers in the unit; None before they are known.
        looks: Whether more such names may be found because some parameters have not had a gradient yet.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: int, optimizers: int = 1) -> None:
        self._optimizer = optimizer
        self.source: StatesSource | None = None
        self.groups, self.shared_size = groups, 2 * groups + 2
        self._every: int | None = None
        self._smoothed = SmoothedNoise()
        self._preconditioners: dict[int, BucketPreconditioner] = {}
        self._preconditioned = False
        self._pending: _Pending | None = None
        self.by_group: tuple[NoiseScale | None, ...] = (None,) * groups
        self.value: NoiseScale | None = None
        self._scale = 1.0  # of the latest step that was measured
        self._received: list[float] = []
        self._sent: tuple[SmoothedNoise, list[float]] | None = None
        self.adam_like: bool | None = None
        self._last_step = -1
        self._step = 0
        self.progress = 0.0
        self.held_factors: list[list[float]] = [[] for _ in range(optimizers)]
        self.adam_steps: list[list[float]] = [[0.0, 0.0, 1.0, 0.0] for _ in range(optimizers)]
        self.counted_elsewhere: list[str] | None = None
        self.looks = True
        self._left_out_at = -2  # steps committed when the list has changed

    @property
    def signal(self) -> NoiseSignal:
        """Strength of the gradient signal relative to its noise; the value is out of date on ranks other than 0."""
        return self._smoothed.signal

    def measures(self, step: int, gradients: int, *, halved: bool) -> bool:
        """True if this step's statistics should be measured.

        Args:
            step: Number of committed steps.
            gradients: Number of gradients in the step (replicas x micro-batches); at least 2 are needed.
            halved: Whether the step was split in half for the measurement.
        """
        self._step = step
        self._pending = None
        dense = self.again or (self._every is None and step < _DENSE_STEPS)
        due = halved or dense or step % (self._every or _EVERY) == 0
        return due and gradients > 1 and self.measures_at(step)

    def measures_at(self, step: int) -> bool:
        """True if single samples' gradients can be measured after ``step`` committed steps."""
        self._step = step
        if self.adam_like is None:
            self.learn_kind()
        return self.source is None or self.source.idle or not self.source.outdated

    def learn_kind(self) -> None:
        """Determine whether the optimizer is Adam-like once its state shows this."""
        source = self.source
        if self._optimizer.state if source is None or source.idle else source.state:
            self.adam_like = is_adam_like(self._optimizer) if source is None else source.adam_like

    def preconditioner(self, bucket: MeasuredGradient) -> Any:
        """Return the factors that the optimizer multiplies the bucket's gradients by; None if it is not Adam-like."""
        if not self.adam_like:
            return None
        source: Any = self.source or self._optimizer
        if bucket.index not in self._preconditioners:
            self._preconditioners[bucket.index] = BucketPreconditioner()
        return self._preconditioners[bucket.index].at(self._step, lambda: bucket.preconditioner(source))

    def collect(
        self,
        step: LoaderStep,
        mean_sq_norms: Sequence[float],
        sq_norms_of_mean: Sequence[float],
        *,
        gradients: int,
        replicas: int,
        preconditioned: bool,
        goes_on: bool = False,
    ) -> None:
        """Estimate the noise of each parameter group from several gradients; see ``noise_scale.estimate``.

        Args:
            mean_sq_norms: Mean squared norms over all gradients, weighted by samples.
            sq_norms_of_mean: Squared norms of the weighted mean gradient.
            gradients: Number of gradients, at least 2.
            preconditioned: Whether norms are multiplied by the optimizer's preconditioner.
            goes_on: Whether this pass added another loss's gradient to the previous pass's reduced gradient. In that
                case, the gradients contain only this loss's noise.
        """
        before, self._pending = self._pending, None
        estimates = estimate_groups(
            mean_sq_norms=mean_sq_norms,
            sq_norms_of_mean=sq_norms_of_mean,
            samples=gradients,
            scale=step.sample_scale,
            share_of_all=step.init_batch_size / step.population if step.population else 0.0,
        )
        if goes_on and estimates is not None:
            estimates = _added(before.estimates, estimates, step.sample_scale) if before is not None else None
        if estimates is not None:
            self._pending = _Pending(estimates, step, replicas, preconditioned)

    def part(self) -> list[float]:
        """Return the latest estimates for this worker's part of a divided model, for :meth:`combine_parts`."""
        pending = self._pending
        if pending is None:
            return [0.0] * self.shared_size
        values = [value for each in pending.estimates for value in (each.sqr, each.var)]
        return [1.0, float(pending.preconditioned), *values]

    def combine_parts(self, parts: Sequence[Sequence[float]]) -> None:
        """Sum ``parts``, the results of :meth:`part` on the unit's workers; drop the estimates if any is missing."""
        if self._pending is None or any(part[:2] != parts[0][:2] or not part[0] for part in parts):
            self._pending = None
            return
        sums = [sum(values) for values in zip(*parts, strict=True)]
        estimates = tuple(NoiseScale(sqr=sqr, var=var) for sqr, var in zip(sums[2::2], sums[3::2], strict=True))
        self._pending = dataclasses.replace(self._pending, estimates=estimates)

    def drop(self) -> None:
        """Drop the latest backward pass's estimates."""
        self._pending = None

    def leave_out(self, counted_elsewhere: list[str], *, looks: bool) -> None:
        """Exclude parameters counted by other workers in the unit (workers that share a replica).

        Args:
            looks: Whether more such parameters may be found later.
        """
        if counted_elsewhere != self.counted_elsewhere:
            self.counted_elsewhere, self._left_out_at = counted_elsewhere, self._step
        self.looks = looks

    @property
    def again(self) -> bool:
        """True if this step must be measured again, because the previous step counted some parameters twice."""
        return self._left_out_at == self._step - 1

    def preconditions(self, buckets: Sequence[MeasuredGradient]) -> bool:
        """True if these buckets' norms are multiplied by the optimizer's preconditioner."""
        return bool(self.adam_like) and any(self.preconditioner(bucket) is not None for bucket in buckets)

    def applied(self) -> None:
        """Add the latest pass's estimates to the averages, because its gradients have been applied."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.preconditioned != self._preconditioned:
            self._smoothed, self._last_step = SmoothedNoise(), -1  # other units from here on
            self._preconditioned = pending.preconditioned
        elapsed = max(1, self._step - self._last_step) if self._last_step >= 0 else 1
        self._last_step = self._step
        self._smoothed = self._smoothed.add(pending.estimates, pending.step.sample_scale, steps=elapsed)
        self._scale = pending.step.scale
        if pending.replicas == 1 and self._smoothed.updates:  # nobody to agree with
            self.by_group, self.value = self._smoothed.groups(self._scale), self._smoothed.whole(self._scale)

    def shared_values(self) -> list[float]:
        """Return rank 0's noise scale as numbers: signal and noise for each group and the model; 0 if unknown."""
        if self._sent is None or self._sent[0] is not self._smoothed:
            known = [*(self._smoothed.groups(self._scale) or (None,) * self.groups), self._smoothed.whole(self._scale)]
            values = [value for noise in known for value in ((noise.sqr, noise.var) if noise else (0.0, 0.0))]
            self._sent = self._smoothed, values
        return self._sent[1]

    def set_shared(self, values: list[float]) -> None:
        """Store rank 0's noise scale, given as its :meth:`shared_values`, after all ranks have received them."""
        if values == self._received:
            return
        self._received = values
        pairs = zip(values[::2], values[1::2], strict=True)
        *groups, self.value = (NoiseScale(sqr=sqr, var=var) if var > 0 else None for sqr, var in pairs)
        self.by_group = tuple(groups)

    def advance(self, scale: float, noise: NoiseScale | None) -> None:
        """Add the scale-invariant progress of a step with ``scale`` (batch size / initial batch size) and ``noise``."""
        self.progress += 1.0 if scale == 1.0 else step_gain(scale, noise)

    def invalidate(self) -> None:
        """Discard preconditioners when the group or the batch changes, so that all ranks recompute them at once."""
        self._pending = None
        self._received = []
        for preconditioner in self._preconditioners.values():
            preconditioner.invalidate()

    def rebuilt(self, groups: int, every: int | None) -> None:
        """Reset the tracker for new buckets.

        Args:
            groups: Number of parameter groups; if it has changed, estimates are started over.
            every: Number of steps from one measurement to the next; None lets the tracker choose.
        """
        self._preconditioners = {}
        self._every = every
        if groups != self.groups:
            self.groups, self.shared_size = groups, 2 * groups + 2
            self._smoothed, self._last_step = SmoothedNoise(), -1
            self.by_group, self.value, self._sent = (None,) * groups, None, None
        self.invalidate()

    def capture(self) -> Any:
        """Return the state for joining ranks and checkpoints."""
        shared = [None if noise is None else [noise.sqr, noise.var] for noise in (*self.by_group, self.value)]
        return {
            "smoothed": self._smoothed.to_dict(),
            "preconditioned": self._preconditioned,
            "shared": shared,
            "scale": self._scale,
            "held_factors": [list(each) for each in self.held_factors],
            "adam_steps": [list(each) for each in self.adam_steps],
            "progress": self.progress,
            "counted_elsewhere": self.counted_elsewhere,
            "looks": self.looks,
            "left_out_at": self._left_out_at,
        }

    def restore(self, tree: Any) -> None:
        """Restore a state returned from :meth:`capture`; preconditioners are recomputed."""
        self._smoothed, self._scale = SmoothedNoise.from_dict(tree["smoothed"]), tree["scale"]
        *groups, self.value = (None if v is None else NoiseScale(sqr=v[0], var=v[1]) for v in tree["shared"])
        self.by_group = tuple(groups)
        self._preconditioned = tree["preconditioned"]
        self.progress = tree["progress"]
        self.counted_elsewhere, self.looks = tree["counted_elsewhere"], tree["looks"]
        self._left_out_at = tree["left_out_at"]
        for mine, theirs in zip(self.held_factors, tree["held_factors"], strict=True):
            mine[:] = theirs
        for mine, theirs in zip(self.adam_steps, tree["adam_steps"], strict=True):
            mine[:] = theirs
        self.invalidate()


def _added(first: Sequence[NoiseScale], second: Sequence[NoiseScale], scale: float) -> tuple[NoiseScale, ...]:
    """Return the noise for a sum of two losses; ``second`` measured the sum's mean and the second loss's noise.

    Their noise is assumed to be independent: var = var1 + var2, and sqr2 still contains var1 / scale from the first.
    """
    return tuple(NoiseScale(sqr=b.sqr - a.var / scale, var=a.var + b.var) for a, b in zip(first, second, strict=True))
