"""Gradient noise scale: how much of a gradient is signal, and how much is sampling noise.

For a loss with true gradient G and per-sample covariance Sigma, a gradient g averaged over B samples has E ||g||^2 =
||G||^2 + tr(Sigma) / B (McCandlish et al. 2018, appendix A.1). With the initial batch M0,

    sqr = ||G||^2                the signal
    var = tr(Sigma) / M0         the noise of a gradient at the initial batch

All values are per parameter group until ``SmoothedNoise.whole`` adds up the groups. This module does not use
torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ray.batch.reports import NoiseSignal
from placement.goodput.model import NoiseScale

TINY = 1e-30
"""Floor of a smoothed ``sqr`` and ``var``: their ratios stay finite, and no gradient of interest is below."""

WINDOW = 1000.0
"""Longest memory of the smoothing, in steps at the initial batch (AdaptDL's 0.999 per step at scale 1)."""

MIN_WINDOW = 16.0
WINDOW_SHARE = 0.25

LEAST_FRESH = 1 / 8
"""Largest share of one estimate in the average once there are some: one of two gradients says little by itself."""

LEAST_UPDATES = 4
"""Estimates before their scatter tells signal from noise."""

_SIZE_SHARE = 1 / 4  # of one estimate in the present size of the gradient
_LARGEST_JUMP = 16.0  # of an estimate over the gradient's size before it


def estimate(*, mean_sq_norm: float, sq_norm_of_mean: float, samples: int, scale: float) -> NoiseScale:
    """Return an estimate of signal and noise from K gradients, averaged with weights given by their samples.

    Gradient i is the mean over n_i of N samples, w_i = n_i / N, and their mean is a gradient at batch N = ``scale`` x
    M0 (equal sizes: w_i = 1 / K):

        a = sum w_i ||g_i||^2                b = ||sum w_i g_i||^2

        sqr = (K b - a) / (K - 1)            var = (a - b) scale / (K - 1)

    Both are unbiased, for both equal and unequal sizes, because Cov g_i = Sigma / n_i: E a = ||G||^2 + K tr(Sigma) /
    (scale M0) and E b = ||G||^2 + tr(Sigma) / (scale M0). With ``scale`` = N, ``var`` is tr(Sigma) itself. Single
    estimates vary widely, and ``sqr`` is often **negative** if noise dominates (``var`` only due to rounding). Smooth
    them with ``SmoothedNoise`` before use.

    Args:
        samples: K, replicas x micro-batches; at least 2.
        scale: Global batch / initial batch, above 0.

    Example:
        >>> estimate(mean_sq_norm=5.0, sq_norm_of_mean=4.0, samples=2, scale=1.0)
        NoiseScale(sqr=3.0, var=1.0)

    Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", A.1; Pollux (OSDI 2021),
    section 3.1.
    """
    sqr = (samples * sq_norm_of_mean - mean_sq_norm) / (samples - 1)
    var = (mean_sq_norm - sq_norm_of_mean) * scale / (samples - 1)
    return NoiseScale(sqr=sqr, var=var)


def estimate_groups(
    *,
    mean_sq_norms: Sequence[float],
    sq_norms_of_mean: Sequence[float],
    samples: int,
    scale: float,
    share_of_all: float = 0.0,
) -> tuple[NoiseScale, ...] | None:
    """Return an estimate for each parameter group; None if a norm is not finite, because the step overflowed.

    Samples drawn without replacement from N are correlated: E <g_i, g_j> = ||G||^2 - tr(Sigma) / N for the gradient G
    over all N, with Sigma their unbiased covariance. The estimates are corrected for this correlation.

    Args:
        mean_sq_norms, sq_norms_of_mean, samples, scale: Same as in ``estimate``; the first two have one value per
            group.
        share_of_all: M0 / N, the initial batch as a fraction of an epoch; 0 if samples come from an endless stream.
    """
    if not all(map(math.isfinite, (*mean_sq_norms, *sq_norms_of_mean))):
        return None
    found = (
        estimate(mean_sq_norm=a, sq_norm_of_mean=b, samples=samples, scale=scale)
        for a, b in zip(mean_sq_norms, sq_norms_of_mean, strict=True)
    )
    return tuple(NoiseScale(sqr=each.sqr + each.var * share_of_all, var=each.var) for each in found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SmoothedNoise:
    """Moving averages of ``sqr`` and ``var`` per parameter group, as plain numbers to send between processes.

    An update after n steps at scale S decays the previous averages by theta = exp(-n S / w), so that the window is
    measured in samples rather than steps (AdaptDL: theta = 0.999^S). The window w is a quarter of the samples seen so
    far, from 16 up to ``window`` steps at the initial batch. The erratic gradients of the first steps are therefore
    soon discounted, and later averages are long. Once there are eight estimates, none of them has a weight above
    ``LEAST_FRESH``. Weights decay in the same way, so that average = decayed sum / decayed weight has no bias towards
    0.

    Each estimate is divided by the gradient's size E ||g||^2 at the initial batch at that time (known from earlier
    estimates, so that the two are independent). Gradients shrink by orders of magnitude as a model learns; without
    this, old, large gradients would dominate the noise for a long time.

    The standard error of the average of ``sqr`` is computed from the scatter of the estimates: with weights w_i and n =
    (sum w_i)^2 / sum w_i^2, its square is sum w_i^2 (x_i - x)^2 / (sum w_i)^2 x n / (n - 1).
    """

    # decayed sums of the signal, one per parameter group, in units of the size; empty before the first update
    sqr: tuple[float, ...] = ()
    var: tuple[float, ...] = ()  # decayed sums of the noise, likewise
    weight: float = 0.0  # decayed sum of the weights, in [0, 1]
    squares: float = 0.0  # decayed sum of their squares
    # decayed sums of squared weight x signal, of each parameter group and then of all together
    first: tuple[float, ...] = ()
    second: tuple[float, ...] = ()  # decayed sums of squared weight x squared signal, likewise
    size: float = 0.0  # present size E ||g||^2 of a gradient at the initial batch
    elapsed: float = 0.0  # progress since the start of the averages, in steps at the initial batch
    window: float = WINDOW  # longest memory, in steps at the initial batch
    updates: int = 0  # number of updates taken in

    def update(
        self, sqr: float | Sequence[float], var: float | Sequence[float], scale: float, *, steps: float = 1.0
    ) -> SmoothedNoise:
        """Return the averages with one more raw estimate; self if the estimate is not finite or is all zero.

        Args:
            sqr: Raw signal, one value per parameter group (or one float for a single group); may be negative.
            var: Raw noise, in the same form.
            scale: Global batch / initial batch of the step, above 0.
            steps: Number of optimizer steps since the previous update; above 1 if not every step is measured.
        """
        new_sqr, new_var = _values(sqr), _values(var)
        if not all(map(math.isfinite, (*new_sqr, *new_var))) or not any((*new_sqr, *new_var)):
            return self  # an overflow; or no gradient, which says nothing of its noise
        size = max(math.fsum((*new_sqr, *new_var)), 0.0)
        largest = math.fsum(map(abs, (*new_sqr, *new_var)))  # where noise prevails, sqr may take away all of the size
        unit = max(self.size or size or largest, largest / _LARGEST_JUMP, TINY)
        signal = [value / unit for value in new_sqr]
        noise = [value / unit for value in new_var]
        signals = [*signal, math.fsum(signal)]
        elapsed = steps * scale + self.elapsed
        span = min(max(elapsed * WINDOW_SHARE, MIN_WINDOW), self.window)
        fresh = -math.expm1(-steps * scale / span)  # 1 - theta, and not 0 for a small scale
        fresh = min(fresh, max(1.0 / (self.updates + 1), LEAST_FRESH))
        kept, zeros = 1.0 - fresh, (0.0,) * len(signals)
        return dataclasses.replace(
            self,
            sqr=_added(self.sqr or zeros[1:], kept, signal, fresh),
            var=_added(self.var or zeros[1:], kept, noise, fresh),
            weight=kept * self.weight + fresh,
            squares=kept**2 * self.squares + fresh**2,
            first=_added(self.first or zeros, kept**2, signals, fresh**2),
            second=_added(self.second or zeros, kept**2, [x * x for x in signals], fresh**2),
            size=self.size + _SIZE_SHARE * (size - self.size) if self.updates else unit,
            elapsed=elapsed,
            updates=self.updates + 1,
        )

    def add(self, estimates: Sequence[NoiseScale] | None, scale: float, *, steps: float = 1.0) -> SmoothedNoise:
        """Return the averages with an estimate added for each parameter group, as in :meth:`update`; self if None."""
        if estimates is None:
            return self
        return self.update([group.sqr for group in estimates], [group.var for group in estimates], scale, steps=steps)

    @property
    def signal(self) -> NoiseSignal:
        """Strength of the signal relative to the noise, according to the averages."""
        return NoiseSignal(present=self.has_signal, size=self.size, updates=self.updates)

    @property
    def has_signal(self) -> bool:
        """True if the model's overall signal exceeds its own standard error."""
        return self.updates >= LEAST_UPDATES and self._signal(len(self.sqr)) > self._error(len(self.sqr))

    def groups(self, scale: float = 1.0) -> tuple[NoiseScale, ...]:
        """Return each parameter group's noise scale, computed as in :meth:`whole`; empty before any update."""
        most = self._most_noise(scale)
        return tuple(self._floored(place, each, most) for place, each in enumerate(self.var))

    def whole(self, scale: float = 1.0) -> NoiseScale | None:
        """Return the noise scale for the entire model; None before the first update.

        A signal below its own standard error is replaced by that error, because nothing smaller can be measured and a
        signal of 0 would mean infinite noise. In this case, the signal is also assumed to be at least var /
        sqrt(scale), so that the gain is at most the square root of the scale. Both values are at least ``TINY``.

        Args:
            scale: Current global batch / initial batch, above 0.
        """
        return self._floored(len(self.sqr), math.fsum(self.var), self._most_noise(scale)) if self.updates else None

    def _most_noise(self, scale: float) -> float:
        """Return the largest assumed ratio of noise to signal."""
        return math.sqrt(scale) if scale > 1.0 and not self.has_signal else math.inf

    def _floored(self, place: int, var_sum: float, most: float) -> NoiseScale:
        var = max(var_sum / self.weight, 0.0)
        sqr = max(self._signal(place), self._error(place), var / most)
        return NoiseScale(sqr=max(sqr * self.size, TINY), var=max(var * self.size, TINY))

    def _signal(self, place: int) -> float:
        """Return the average signal of group `place`, or of all groups if `place` is past the end, in units of size."""
        sums = self.sqr[place] if place < len(self.sqr) else math.fsum(self.sqr)
        return sums / self.weight

    def _error(self, place: int) -> float:
        """Return the standard error of :meth:`_signal`; 0 as long as there are too few estimates."""
        count = self.weight**2 / self.squares if self.squares else 0.0
        if self.updates < LEAST_UPDATES or count <= 1.0:
            return 0.0
        mean = self._signal(place)
        scatter = self.second[place] - 2.0 * mean * self.first[place] + mean * mean * self.squares
        return math.sqrt(max(scatter, 0.0) * count / (count - 1.0)) / self.weight

    def to_dict(self) -> dict[str, Any]:
        """Return the averages as plain lists and numbers, for joining ranks and ``torch.load(weights_only=True)``."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in state.items()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SmoothedNoise:
        """Return the averages stored by :meth:`to_dict`."""
        found: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in state.items()}
        return cls(**found)


def _added(old: Sequence[float], kept: float, new: Sequence[float], fresh: float) -> tuple[float, ...]:
    return tuple(kept * o + fresh * n for o, n in zip(old, new, strict=True))


def _values(values: float | Sequence[float]) -> tuple[float, ...]:
    if isinstance(values, (int, float)):
        return (float(values),)
    return tuple(float(value) for value in values)
