"""Measures the gradient noise scale of one model inside its training steps (torch; the mathematics is elsewhere)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_ray.batch.noise_scale import SmoothedNoise, estimate_groups
from elastic_ray.batch.scaling_rules import step_gain
from elastic_ray.batch.statistics import (
    BucketPreconditioner,
    SuccessiveGradients,
    is_adam_like,
    squared_norm,
)
from elastic_ray.parallel.buckets import Bucket
from elastic_ray.step import Step
from placement.goodput import NoiseScale

# Statistics are smoothed over many steps, so after the first ones a sample of the steps is enough.
_DENSE_STEPS = 32
_EVERY = 4


class NoiseTracker:
    """Smoothed noise scale per parameter group.

    Rank 0 measures; what it finds travels with the next gradient reduction, so that every rank scales its learning
    rate by the very same numbers, one step later.

    Args:
        optimizer: for preconditioning, where it is of Adam's kind.
        groups: number of parameter groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: int) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._smoothed = SmoothedNoise()
        self._pairs = SuccessiveGradients(groups=groups)
        self._preconditioners: dict[int, BucketPreconditioner] = {}
        self._shared: tuple[NoiseScale | None, ...] = (None,) * groups
        self._adam_like: bool | None = None
        self._last_step = -1
        self._step = 0
        self.progress = 0.0

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def value(self) -> NoiseScale | None:
        """The whole model's noise scale, None before there is an estimate."""
        known = [noise for noise in self._shared if noise is not None]
        if not known:
            return None
        return NoiseScale(sqr=sum(noise.sqr for noise in known), var=sum(noise.var for noise in known))

    @property
    def by_group(self) -> tuple[NoiseScale | None, ...]:
        """Noise scale of each parameter group, as every rank knows it in this step."""
        return self._shared

    # -- measuring ---------------------------------------------------------------------------------------------

    def measures(self, step: int, gradients: int) -> bool:
        """Whether this step's statistics are taken, from ``gradients`` gradients (replicas x micro-batches)."""
        self._step = step
        if gradients == 1:
            return self._pairs.wants(step)
        return step < _DENSE_STEPS or step % _EVERY == 0

    def local_norm(self, grads: Sequence[torch.Tensor | None], bucket: Bucket) -> float:
        """Squared norm of this rank's unweighted gradient in one bucket."""
        present = [g for g in grads if g is not None]
        if not present:
            return 0.0
        precondition = self._preconditioner(bucket)
        if precondition is None:
            return float(torch.stack(torch._foreach_norm(present)).square_().sum())
        flat = torch.cat(
            [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(bucket.params, grads, strict=True)]
        )
        return float(squared_norm(flat, precondition))

    def _preconditioner(self, bucket: Bucket) -> torch.Tensor | None:
        if self._adam_like is None and self._optimizer.state:
            self._adam_like = is_adam_like(self._optimizer)
        if not self._adam_like:
            return None
        if bucket.index not in self._preconditioners:
            self._preconditioners[bucket.index] = BucketPreconditioner(self._optimizer, bucket.params)
        return self._preconditioners[bucket.index].at(self._step)

    def collect(
        self,
        step: Step,
        local_norms: Sequence[float],
        buckets: Sequence[Bucket],
        *,
        replicas: int,
        grad_scale: float,
        steps: int,
    ) -> None:
        """Estimate from several gradients: ``local_norms`` are summed over all of them, buckets hold the mean."""
        gradients = replicas * step.micro_steps
        sizes = [size for row in step.sizes for size in row]
        if gradients < 2 or max(sizes) > 1.1 * min(sizes) + 1:
            return  # the estimator wants gradients of equal size
        means = [0.0] * self._groups
        for bucket in buckets:
            means[bucket.group] += float(squared_norm(bucket.body, self._preconditioner(bucket)))
        squared = grad_scale * grad_scale
        estimates = estimate_groups(
            mean_sq_norms=[norm / gradients / squared for norm in local_norms],
            sq_norms_of_mean=[norm / squared for norm in means],
            samples=gradients,
            scale=step.scale,
        )
        self._pairs.reset()
        self._update(estimates, step.scale, steps, successive=False)
        if replicas == 1:
            self._shared = self._smoothed.groups or self._shared  # one rank: nobody to agree with

    def pair(self, step: Step, buckets: Sequence[Bucket], grad_scale: float, steps: int) -> None:
        """One replica without accumulation: estimate from two successive gradients."""
        for bucket in buckets:
            for index, param in enumerate(bucket.params):
                if param.grad is not None:
                    self._pairs.add(
                        steps,
                        bucket.index << 20 | index,
                        param.grad.reshape(-1),
                        batch_size=step.count,
                        group=bucket.group,
                        precond=self._slice(bucket, index),
                        grad_scale=grad_scale,
                    )
        norms = self._pairs.take()
        if norms is not None:
            self._update(norms.estimates(max(1, round(step.count / step.scale))), step.scale, steps, successive=True)
            self._shared = self._smoothed.groups or self._shared  # one rank: nobody to agree with

    def _slice(self, bucket: Bucket, index: int) -> torch.Tensor | None:
        precondition = self._preconditioner(bucket)
        if precondition is None:
            return None
        start = sum(p.numel() for p in bucket.params[:index])
        return precondition[start : start + bucket.params[index].numel()]

    def _update(self, estimates: tuple[NoiseScale, ...] | None, scale: float, steps: int, *, successive: bool) -> None:
        if estimates is None:
            return
        elapsed = max(1, steps - self._last_step) if self._last_step >= 0 else 1
        self._last_step = steps
        self._smoothed = self._smoothed.update(
            [noise.sqr for noise in estimates],
            [noise.var for noise in estimates],
            scale,
            steps=elapsed,
            successive=successive,
        )

    # -- agreeing ----------------------------------------------------------------------------------------------

    def shared_values(self) -> list[float]:
        """Rank 0's noise scale for the reduction: sqr and var of each group, zeros while unknown."""
        groups = self._smoothed.groups or (None,) * self._groups
        return [value for noise in groups for value in ((noise.sqr, noise.var) if noise else (0.0, 0.0))]

    def take_shared(self, values: Sequence[float]) -> None:
        """Rank 0's noise scale as all ranks got it."""
        pairs = zip(values[::2], values[1::2], strict=True)
        self._shared = tuple(NoiseScale(sqr=sqr, var=var) if var > 0 else None for sqr, var in pairs)

    def advance(self, scale: float) -> None:
        """Count the scale-invariant progress of an applied step."""
        self.progress += step_gain(scale, self.value)

    # -- travelling --------------------------------------------------------------------------------------------

    def capture(self) -> Any:
        """State for joiners and checkpoints."""
        shared = [None if noise is None else [noise.sqr, noise.var] for noise in self._shared]
        return {"smoothed": self._smoothed.to_dict(), "shared": shared, "progress": self.progress}

    def restore(self, tree: Any) -> None:
        """Take over a captured state; kept gradients and preconditioners start afresh."""
        self._smoothed = SmoothedNoise.from_dict(tree["smoothed"])
        self._shared = tuple(None if v is None else NoiseScale(sqr=v[0], var=v[1]) for v in tree["shared"])
        self.progress = tree["progress"]
        self._pairs.reset()
        for preconditioner in self._preconditioners.values():
            preconditioner.invalidate()
