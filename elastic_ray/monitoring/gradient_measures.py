"""Measures of a model's gradients, and of the steps that trained it (pure)."""

from __future__ import annotations

import dataclasses
import math

from elastic_ray.monitoring.measures import WorkerMeasures
from placement.goodput.model import NoiseScale


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientVariance:
    """Variance of single samples' gradients, as measured in one step; a raw, unbiased estimate.

    Attributes:
        step: optimizer steps that were committed before the one that was measured.
        batch_size: samples of that step, N.
        groups: tr(Sigma) of each parameter group: the trace of the covariance of one sample's gradient. The gradient of
            a mean over n samples has variance tr(Sigma) / n.
    """

    step: int
    batch_size: int
    groups: tuple[float, ...]

    @property
    def total(self) -> float:
        """tr(Sigma) of the whole model."""
        return math.fsum(self.groups)

    @property
    def of_step(self) -> float:
        """Variance of the step's own gradient, tr(Sigma) / N."""
        return self.total / self.batch_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorms:
    """2-norms in one step.

    Attributes:
        step: optimizer steps that were committed before the one that was measured.
        gradients: of the mean gradient of the step's samples as ``backward()`` left it, by parameter group: without
            AMP's loss scale, and before user code has clipped it.
        updates: of what the optimizer added to the parameters, ``|p_after - p_before|``, likewise.
    """

    step: int
    gradients: tuple[float, ...]
    updates: tuple[float, ...]

    @property
    def gradient(self) -> float:
        """Norm of the whole model's gradient."""
        return math.hypot(*self.gradients)

    @property
    def update(self) -> float:
        """Norm of the whole model's update."""
        return math.hypot(*self.updates)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasures:
    """Measures of one model's steps, the same on every rank after each committed step of training.

    What has not been asked for (``Monitor``), or not been measured yet in the present group, is None. In a group of
    several workers, what one step has shown is known with the next one.

    Attributes:
        noise: the smoothed gradient noise scale; for optimizers of Adam's kind of the preconditioned gradient.
        initial_batch_size: M0, samples that ``noise.var`` counts for; 0 before the first step.
        variance: the latest variance of the gradient.
        norms: the latest norms of gradient and update.
        workers: each rank's times, memory and bytes, in rank order; empty where not asked for.
    """

    noise: NoiseScale | None = None
    initial_batch_size: int = 0
    variance: GradientVariance | None = None
    norms: GradientNorms | None = None
    workers: tuple[WorkerMeasures, ...] = ()

    @property
    def noise_batch(self) -> float | None:
        """B_simple = tr(Sigma) / ||G||^2 [samples], at and above 0; None before there is an estimate.

        A batch far below it gains from more samples almost as from more steps, one far above hardly at all.
        Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", eq. 2.9 and appendix A.
        """
        if self.noise is None or self.noise.sqr <= 0:
            return None
        return max(0.0, self.noise.var) * self.initial_batch_size / self.noise.sqr
