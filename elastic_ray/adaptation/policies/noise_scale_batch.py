"""Policy that adapts the batch to the gradient noise scale (McCandlish et al. 2018; KungFu's example)."""

from __future__ import annotations

from elastic_ray.adaptation.policies.ready import ReadyPolicy
from elastic_ray.adaptation.policy import Answer
from elastic_ray.adaptation.requests import SetBatch
from elastic_ray.adaptation.view import PolicyView


class NoiseScaleBatch(ReadyPolicy):
    """Policy that adapts the batch to the gradient noise scale (McCandlish et al. 2018; KungFu's example).

    Every ``every`` steps it requests a batch of factor * mean(B), clipped to the bounds; B is ``view.noise_scale`` and
    mean is a moving average. Below the noise scale, a larger batch saves steps; above it, a larger batch wastes
    samples. This policy replaces the job's own goodput-based choice of a batch. Unlike that choice, it ignores how long
    a step takes.

    Args:
        factor: batch in units of the noise scale, above 0.
        smoothing: weight of the past in the moving average, 0 or more and below 1; 0 uses the latest value only.
        hysteresis: smallest ratio of the desired batch to the current batch, or its inverse, that causes a change, 1 or
            more.
        growth: largest ratio of a single change, above 1. A limit is useful because learning rates that depend on the
            batch need time to adapt, and early noise estimates are rough.
        every: steps between two decisions.
        min_batch_size: smallest batch [samples]; None uses the loader's initial batch.
        max_batch_size: largest batch [samples]; None uses the loader's limit, which always applies.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Examples:
        >>> from elastic_ray.adaptation import NoiseScaleBatch
        >>> NoiseScaleBatch(max_batch_size=1024, every=20).every
        20
    """

    starts_at_initial = True

    def __init__(
        self,
        *,
        factor: float = 1.0,
        smoothing: float = 0.9,
        hysteresis: float = 1.5,
        growth: float = 2.0,
        every: int = 50,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        self.factor = self._number("factor", factor, above=0.0)
        self.smoothing = self._number("smoothing", smoothing, least=0.0, below=1.0)
        self.hysteresis = self._number("hysteresis", hysteresis, least=1.0)
        self.growth = self._number("growth", growth, above=1.0)
        self.every = self._whole("every", every, least=1)
        self.least = None if min_batch_size is None else self._whole("min_batch_size", min_batch_size, least=1)
        least = self.least or 1
        self.most = None if max_batch_size is None else self._whole("max_batch_size", max_batch_size, least=least)
        self.mean: float | None = None
        self.asked: int | None = None

    def after_step(self, view: PolicyView) -> Answer:
        """Update the moving average; every ``every`` steps, return a request for a new batch if it differs enough."""
        noise, limit = view.noise_scale, view.max_batch_size
        if noise is None or limit is None:
            return None
        self.mean = noise if self.mean is None else self.smoothing * self.mean + (1 - self.smoothing) * noise
        if view.step % self.every:
            return None
        most = limit if self.most is None else min(limit, self.most)
        least = view.initial_batch_size if self.least is None else self.least
        wanted = max(min(least, most), min(most, self.factor * self.mean))
        present = self.asked or view.batch_size
        if round(wanted) == present or present / self.hysteresis < wanted < present * self.hysteresis:
            return None
        self.asked = max(1, round(max(present / self.growth, min(present * self.growth, wanted))))
        return SetBatch(self.asked)
