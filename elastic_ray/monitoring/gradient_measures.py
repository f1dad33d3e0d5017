"""Measures of a model's gradients and of its training steps (pure)."""

from __future__ import annotations

import dataclasses
import math

from elastic_ray.monitoring.measures import WorkerMeasures
from placement.goodput.model import NoiseScale


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientVariance:
    """Variance of per-sample gradients, measured in one step; a raw, unbiased estimate.

    Attributes:
        step: Number of optimizer steps committed before the measured step.
        batch_size: N, the number of samples in that step.
        groups: tr(Sigma) of each parameter group: the trace of the covariance of one sample's gradient. The gradient of
            a mean over n samples has variance tr(Sigma) / n.
    """

    step: int
    batch_size: int
    groups: tuple[float, ...]

    @property
    def total(self) -> float:
        """Variance tr(Sigma) of one sample's gradient, over the entire model."""
        return math.fsum(self.groups)

    @property
    def of_step(self) -> float:
        """Variance of the measured step's gradient, tr(Sigma) / N."""
        return self.total / self.batch_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorms:
    """L2 norms of gradients and parameter updates in one step.

    Attributes:
        step: Number of optimizer steps committed before the measured step.
        gradients: Norm, for each parameter group, of the step's mean gradient after ``backward()``: with AMP's loss
            scale removed, and before user code clips it.
        updates: Norm, for each parameter group, of the change made by the optimizer, ``|p_after - p_before|``.
    """

    step: int
    gradients: tuple[float, ...]
    updates: tuple[float, ...]

    @property
    def gradient(self) -> float:
        """Norm of the entire model's gradient."""
        return math.hypot(*self.gradients)

    @property
    def update(self) -> float:
        """Norm of the entire model's parameter update."""
        return math.hypot(*self.updates)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasures:
    """Measures of one model's steps, identical on every rank after each committed training step.

    A measure is None if it was not requested (``Monitor``), or has not been measured yet in the current group of
    workers. In a group with several workers, a step's results become available after the next step.

    Attributes:
        noise: Smoothed gradient noise scale; for Adam and similar optimizers, it refers to preconditioned gradients.
        initial_batch_size: M0, the batch size that ``noise.var`` refers to [samples]; 0 before the first step.
        variance: Latest variance of the gradient.
        norms: Latest norms of gradient and update.
        workers: Times, memory and bytes of each worker, in rank order; empty if not requested.
    """

    noise: NoiseScale | None = None
    initial_batch_size: int = 0
    variance: GradientVariance | None = None
    norms: GradientNorms | None = None
    workers: tuple[WorkerMeasures, ...] = ()

    @property
    def noise_batch(self) -> float | None:
        """Batch size where the gradient's noise equals its signal [samples]; None before the first estimate.

        B_simple = tr(Sigma) / ||G||^2, 0 or more. For batches far below this size, a larger batch helps almost as much
        as more steps; far above it, hardly at all. Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch
        Training", eq. 2.9 and appendix A.
        """
        return None if self.noise is None else self.noise.batch_size(self.initial_batch_size)
