"""The gradient noise scale: how much of a gradient is signal, how much is noise of sampling.

For a loss with true gradient G and per-sample covariance Sigma, a gradient g averaged over B samples has
E ||g||^2 = ||G||^2 + tr(Sigma) / B (McCandlish et al. 2018, appendix A.1). With M0 the initial batch,

    sqr = ||G||^2                the signal
    var = tr(Sigma) / M0         the noise of a gradient at the initial batch

All values are per parameter group until ``SmoothedNoise.value`` adds the groups up. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from placement.goodput.model import NoiseScale

TINY = 1e-30
"""Floor of a smoothed ``sqr`` and ``var``: their ratios stay finite, and no gradient of interest is below."""

WINDOW = 1000.0
"""Longest memory of the smoothing, in steps at the initial batch (AdaptDL's 0.999 per step at scale 1)."""

MIN_WINDOW = 16.0
WINDOW_SHARE = 0.25


def estimate(*, mean_sq_norm: float, sq_norm_of_mean: float, samples: int, scale: float) -> NoiseScale:
    """Signal and noise from K gradients that were averaged into one, each weighted by its share of the samples.

    Where gradient i is the mean over n_i of N samples, w_i = n_i / N, and the mean of all is a gradient at batch N =
    ``scale`` x M0 (equal sizes: w_i = 1 / K):

        a = sum w_i ||g_i||^2                b = ||sum w_i g_i||^2

        sqr = (K b - a) / (K - 1)            var = (a - b) scale / (K - 1)

    Both are unbiased, for equal and unequal sizes alike, as Cov g_i = Sigma / n_i: E a = ||G||^2 + K tr(Sigma) /
    (scale M0) and E b = ||G||^2 + tr(Sigma) / (scale M0). With ``scale`` = N, ``var`` is tr(Sigma) itself.
    They are raw: single estimates scatter widely and ``sqr`` is often **negative** when noise prevails
    (``var`` only by rounding); smooth them with ``SmoothedNoise`` before use.

    Args:
        mean_sq_norm: a, weighted mean of the squared norms.
        sq_norm_of_mean: b, squared norm of the mean.
        samples: K, replicas x micro-batches; at least 2.
        scale: global batch / initial batch, above 0.

    Raises:
        ValueError: fewer than two samples, a scale that is not a finite number above 0, or norms that are not
            finite.

    Example:
        >>> estimate(mean_sq_norm=5.0, sq_norm_of_mean=4.0, samples=2, scale=1.0)
        NoiseScale(sqr=3.0, var=1.0)

    Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", A.1; Pollux (OSDI 2021),
    section 3.1.
    """
    if samples < 2:
        raise ValueError(
            f"samples must be 2 or more gradients to tell signal from noise, but got {samples}; "
            "for one gradient per step use estimate_successive"
        )
    _check_scale(scale)
    sqr = (samples * sq_norm_of_mean - mean_sq_norm) / (samples - 1)
    var = (mean_sq_norm - sq_norm_of_mean) * scale / (samples - 1)
    return NoiseScale(sqr=sqr, var=var)


def estimate_successive(*, prev_sq_norm: float, sq_norm: float, dot: float, scale: float) -> NoiseScale:
    """Signal and noise when there is one gradient per step: two consecutive steps serve as two samples.

    Let g' and g be the gradients of steps t - 1 and t, each over a batch of M = ``scale`` x M0 samples. If
    one step moves G little, they are K = 2 independent gradients of equal size whose mean is a gradient over
    2 M samples, hence at scale 2 M / M0:

        a = (||g'||^2 + ||g||^2) / 2         b = ||(g' + g) / 2||^2 = (||g'||^2 + ||g||^2 + 2 <g', g>) / 4

        sqr = 2 b - a           = <g', g>
        var = (a - b) 2 M / M0  = (||g' - g||^2 / 2) M / M0

        E sqr = <G', G>         E var = tr(Sigma) / M0 + (||G' - G||^2 / 2) M / M0

    For G' = G that is what ``estimate`` gives for several replicas; a G that turns within one step adds to
    the noise and takes from the signal, so the one-replica estimate errs towards a noisier gradient.

    Args:
        prev_sq_norm: ||g'||^2.
        sq_norm: ||g||^2.
        dot: <g', g>.
        scale: batch of *one* of the two gradients / initial batch (both had the same), above 0.
    """
    a = (prev_sq_norm + sq_norm) / 2
    b = (prev_sq_norm + sq_norm + 2 * dot) / 4
    return estimate(mean_sq_norm=a, sq_norm_of_mean=b, samples=2, scale=2 * scale)


def estimate_groups(
    *, mean_sq_norms: Sequence[float], sq_norms_of_mean: Sequence[float], samples: int, scale: float
) -> tuple[NoiseScale, ...] | None:
    """``estimate`` for each parameter group; None where a norm is not finite (a step that overflowed)."""
    if not all(map(math.isfinite, (*mean_sq_norms, *sq_norms_of_mean))):
        return None
    return tuple(
        estimate(mean_sq_norm=a, sq_norm_of_mean=b, samples=samples, scale=scale)
        for a, b in zip(mean_sq_norms, sq_norms_of_mean, strict=True)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SmoothedNoise:
    """Moving averages of ``sqr`` and ``var`` per parameter group, plain numbers that any process can be sent.

    An update after n steps at scale S decays what was known by theta = exp(-n S / w), so that memory is
    counted in samples and not in steps (AdaptDL: theta = 0.999^S). The window w grows as a quarter of what
    has been seen, from 16 up to ``window`` steps at the initial batch: the wild gradients of the first steps
    are soon forgotten, later the average is long. Weights decay alike, and average = decayed sum / decayed
    weight has no bias towards 0.

    Attributes:
        sqr: decayed sums of the signal, one per parameter group; empty before the first update.
        var: decayed sums of the noise, likewise.
        weight: decayed sum of the weights, in [0, 1].
        elapsed: progress since (re)start of the averages, in steps at the initial batch.
        window: longest memory, in steps at the initial batch.
        successive: the latest update came from successive gradients (one replica).
        updates: number of updates taken in.
    """

    sqr: tuple[float, ...] = ()
    var: tuple[float, ...] = ()
    weight: float = 0.0
    elapsed: float = 0.0
    window: float = WINDOW
    successive: bool = False
    updates: int = 0

    def __post_init__(self) -> None:
        if not self.window > 0:
            raise ValueError(f"window must be above 0 steps at the initial batch, but got {self.window}")
        if len(self.sqr) != len(self.var):
            raise ValueError(
                f"sqr and var must have one value per parameter group, but got {len(self.sqr)} and {len(self.var)}"
            )

    def update(
        self,
        sqr: float | Sequence[float],
        var: float | Sequence[float],
        scale: float,
        *,
        steps: float = 1.0,
        successive: bool = False,
    ) -> SmoothedNoise:
        """The averages with one more raw estimate; self where any of its values is not finite.

        Args:
            sqr: raw signal, one value per parameter group (or one float for a single group); may be negative.
            var: raw noise, likewise.
            scale: global batch / initial batch of the step, above 0.
            steps: optimizer steps since the update before, where statistics are sampled rarely.
            successive: the estimate comes from ``estimate_successive``. Where that changes, the window starts
                anew: values stay, but the other estimator's bias is forgotten within a few steps.
        """
        _check_scale(scale)
        new_sqr, new_var = _values(sqr), _values(var)
        if len(new_sqr) != len(new_var) or (self.sqr and len(new_sqr) != len(self.sqr)):
            raise ValueError(
                f"sqr and var must have one value for each of the {len(self.sqr) or len(new_sqr)} parameter "
                f"groups, but got {len(new_sqr)} and {len(new_var)}"
            )
        if not all(map(math.isfinite, (*new_sqr, *new_var))):
            return self
        elapsed = steps * scale + (self.elapsed if successive == self.successive else 0.0)
        span = min(max(elapsed * WINDOW_SHARE, MIN_WINDOW), self.window)
        fresh = -math.expm1(-steps * scale / span)  # 1 - theta, and not 0 for a small scale
        zeros = (0.0,) * len(new_sqr)
        return dataclasses.replace(
            self,
            sqr=_decayed(self.sqr or zeros, new_sqr, fresh),
            var=_decayed(self.var or zeros, new_var, fresh),
            weight=(1 - fresh) * self.weight + fresh,
            elapsed=elapsed,
            successive=successive,
            updates=self.updates + 1,
        )

    def add(
        self,
        estimates: Sequence[NoiseScale] | None,
        scale: float,
        *,
        steps: float = 1.0,
        successive: bool = False,
    ) -> SmoothedNoise:
        """``update`` with raw estimates, one per parameter group; self for None (a step that overflowed)."""
        if estimates is None:
            return self
        sqr, var = [group.sqr for group in estimates], [group.var for group in estimates]
        return self.update(sqr, var, scale, steps=steps, successive=successive)

    @property
    def groups(self) -> tuple[NoiseScale, ...]:
        """The average of each parameter group, both values at least ``TINY``; empty before any update."""
        return tuple(
            NoiseScale(sqr=max(sqr / self.weight, TINY), var=max(var / self.weight, TINY))
            for sqr, var in zip(self.sqr, self.var, strict=True)
        )

    @property
    def value(self) -> NoiseScale | None:
        """The whole model's average, both values at least ``TINY``; None before the first update.

        Groups are added up before the floor, so that a group's negative estimate cancels what it should.
        """
        if not self.updates:
            return None
        return NoiseScale(
            sqr=max(math.fsum(self.sqr) / self.weight, TINY), var=max(math.fsum(self.var) / self.weight, TINY)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for joiners and ``torch.load(weights_only=True)``."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**state, "sqr": list(self.sqr), "var": list(self.var)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SmoothedNoise:
        """What ``to_dict`` wrote."""
        return cls(**{**state, "sqr": tuple(state["sqr"]), "var": tuple(state["var"])})


def _decayed(old: Sequence[float], new: Sequence[float], fresh: float) -> tuple[float, ...]:
    return tuple((1 - fresh) * o + fresh * n for o, n in zip(old, new, strict=True))


def _values(values: float | Sequence[float]) -> tuple[float, ...]:
    if isinstance(values, (int, float)):
        return (float(values),)
    return tuple(float(value) for value in values)


def _check_scale(scale: float) -> None:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be batch size / initial batch size, above 0, but got {scale}")
