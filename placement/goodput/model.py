"""Goodput of a training job on given resources: throughput x statistical efficiency, at its best batch.

Source: Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021, sections
3.1 (statistical efficiency) and 3.2 (system throughput). This is the only implementation; the allocator, the batch
tuner and the simulator all use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from placement.goodput.fitting import Observation, fit
from placement.goodput.step_time import LARGEST, FloatOrArray, Floats, ThroughputModel, plain, real, reals, resources

__all__ = ["GoodputModel", "NoiseScale", "Observation", "ThroughputModel", "fit"]

AtomicRange: TypeAlias = "tuple[int | None, int | None] | None"

_EXACT = 2**53  # up to here a float64 holds every whole number
_COARSE = 32  # batch sizes tried per (nodes, replicas), in geometric steps
_FINE = 13  # batch sizes tried between the neighbours of the best coarse one
_ENDS = 16  # numbers of micro-steps whose smallest and largest batch are tried too


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """Squared norm and variance of a job's gradient at its initial batch size M0; their ratio is the noise scale.

    Neither quantity can be negative, but their unbiased estimates can. Negative estimates are kept, because
    smoothing must average them unchanged, and count as 0 in `gain`.
    """

    sqr: float  # Squared norm of the true gradient
    var: float  # Trace of the covariance of the gradient of one batch of M0 samples, same unit as `sqr`

    def __post_init__(self) -> None:
        for name in ("sqr", "var"):
            object.__setattr__(self, name, real(name, getattr(self, name)))

    def batch_size(self, init_batch_size: int) -> float | None:
        """Return the simple noise scale B = tr(Sigma) / |G|^2 [samples] (McCandlish et al. 2018, eq. 2.9).

        ``var`` is of batches of ``init_batch_size`` samples. None if the estimate of ``sqr`` is not above 0.
        """
        return None if self.sqr <= 0 else max(0.0, self.var) * init_batch_size / self.sqr

    def gain(self, scale: ArrayLike) -> FloatOrArray:
        """Return the progress of one step at batch `scale` x M0, measured in steps at M0.

            gain(scale) = (var + sqr) / (var / scale + sqr)

        The gain never falls as the scale rises. For scale >= 1 it is between 1 and `scale`: it is `scale` for a
        gradient of pure noise (sqr = 0), and 1 for a gradient without noise (var = 0) or if nothing is known (both 0).
        """
        x = reals("scale", scale, at_least=0)
        positive = np.where(x > 0, x, 1.0)
        # Rounding may leave the product an ulp outside the bounds that hold for the formula.
        gain = np.clip(positive * self.efficiency_at(positive), np.minimum(positive, 1.0), np.maximum(positive, 1.0))
        return plain(np.where(x > 0, gain, 0.0 if self.var > 0 else 1.0))

    def efficiency_at(self, scale: Floats) -> Floats:
        """Return gain(scale) / scale = (var + sqr) / (var + sqr scale); the scales must be positive (not checked)."""
        sqr, var = max(self.sqr, 0.0), max(self.var, 0.0)
        top = max(sqr, var)
        sqr, var = (sqr / top, var / top) if top > 0 else (1.0, 0.0)
        with np.errstate(over="ignore"):
            return np.minimum((var + sqr) / (var + sqr * scale), LARGEST)


@dataclass(frozen=True, slots=True)
class _BatchQuery:
    """Arguments of `GoodputModel.best`: one column for each pair of nodes and replicas, and the limits."""

    nodes: Floats
    replicas: Floats
    limit: int
    low: float
    high: float
    accumulation: bool


# (goodput, m, k = s + 1) of each column; goodput is -1 where nothing fits.
_BestBatches: TypeAlias = tuple[Floats, Floats, Floats]


@dataclass(frozen=True, slots=True, init=False)
class GoodputModel:
    """Goodput of a job: samples per second, each weighted by its progress relative to the initial batch size M0.

    With batch size M = R m (s + 1)::

        throughput = M / T_step                      samples/s; T_step as in `ThroughputModel`
        efficiency = gain(M / M0) / (M / M0)         in (0, 1] for M >= M0; gain as in `NoiseScale`
        goodput    = throughput x efficiency

    Constructed as `GoodputModel(throughput, noise, init_batch_size)`. The first argument is stored as
    `throughput_model`, since `throughput` is a method. Arguments of the methods are as in
    `ThroughputModel.step_time`: scalars give a Python float, arrays broadcast. Results are finite for all
    arguments: a rate too large for a float becomes the largest float.
    """

    throughput_model: ThroughputModel
    noise: NoiseScale
    init_batch_size: int

    def __init__(self, throughput: ThroughputModel, noise: NoiseScale, init_batch_size: int) -> None:
        if not isinstance(throughput, ThroughputModel):
            raise TypeError(f"throughput must be a ThroughputModel, but got {throughput!r}")
        if not isinstance(noise, NoiseScale):
            raise TypeError(f"noise must be a NoiseScale, but got {noise!r}")
        object.__setattr__(self, "throughput_model", throughput)
        object.__setattr__(self, "noise", noise)
        object.__setattr__(self, "init_batch_size", _whole("init_batch_size", init_batch_size))

    def step_time(
        self, nodes: ArrayLike, replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> FloatOrArray:
        """Return the time of one optimizer step [s]; arguments as in `ThroughputModel.step_time`."""
        return self.throughput_model.step_time(nodes, replicas, atomic_bsz, accum_steps)

    def throughput(
        self, nodes: ArrayLike, replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> FloatOrArray:
        """Return the throughput [samples/s]: global batch / step time; arguments as in `ThroughputModel.step_time`."""
        return plain(self._throughput(*_checked(nodes, replicas, atomic_bsz, accum_steps)))

    def efficiency(self, batch_size: ArrayLike) -> FloatOrArray:
        """Return the progress per sample at this batch size M, relative to the progress at the initial batch size M0.

        This is gain(M / M0) / (M / M0), with the gain of `NoiseScale`. It never rises with M; below M0 it is at least
        1.
        """
        return plain(self._efficiency(reals("batch_size", batch_size, at_least=1)))

    def goodput(
        self, nodes: ArrayLike, replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> FloatOrArray:
        """Return throughput x efficiency [useful samples/s]; arguments as in `ThroughputModel.step_time`."""
        return plain(self._goodput(*_checked(nodes, replicas, atomic_bsz, accum_steps)))

    def best(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        *,
        max_batch_size: int | None = None,
        atomic_bsz_range: AtomicRange = None,
        accumulation: bool = False,
    ) -> tuple[FloatOrArray, Any, Any]:
        """Return (goodput, atomic_bsz, accum_steps) of the batch with the highest goodput, for each (nodes, replicas).

        The global batch of a step is M = R m (s + 1) samples, with m = atomic_bsz and s = accum_steps. M is in
        [init_batch_size, max_batch_size], and m in ``atomic_bsz_range``. The search tries about a hundred batch sizes
        in geometric steps and refines the best; it is deterministic. If no batch within the limits is a multiple of R
        (s + 1), the next smaller batch that fits is used, just below init_batch_size. If nothing fits, all three
        results are 0.

        Args:
            max_batch_size: Upper limit of M. If None, M is exactly init_batch_size, split as evenly as possible;
                atomic_bsz is then the largest share, ceil(M / R), and goodput M / T_step (0 if there are more
                replicas than samples).
            atomic_bsz_range: Least and largest m; either may be None for no bound.
            accumulation: True if s may be above 0; accumulation is used if a share exceeds the largest m.
        """
        n, r = np.broadcast_arrays(*resources(nodes, replicas))
        low, high = _bounds(atomic_bsz_range)
        limit = None if max_batch_size is None else _whole("max_batch_size", max_batch_size)
        if limit is not None and limit < self.init_batch_size:
            raise ValueError(
                f"max_batch_size must be at least init_batch_size ({self.init_batch_size}), but got {limit}"
            )
        ask = _BatchQuery(n.ravel(), r.ravel(), limit or 0, low, high, accumulation)
        with np.errstate(over="ignore", under="ignore"):
            value, m, k = self._fixed_batch(ask) if limit is None else self._search(ask)
        fits = value >= 0
        goodput = np.where(fits, value, 0.0).reshape(n.shape)
        atomic_bsz, accum_steps = (np.where(fits, x, 0).astype(np.int64).reshape(n.shape) for x in (m, k - 1))
        return plain(goodput), plain(atomic_bsz), plain(accum_steps)

    def held_at(self, batch_size: int) -> tuple[GoodputModel, float]:
        """Return (model, worth): this model with its batch fixed, and the worth of a sample at that batch.

        ``worth`` is the progress per sample relative to the progress at this model's initial batch size. The returned
        model has ``batch_size`` as its initial batch size, so `best` without ``max_batch_size`` never changes it. The
        returned model's goodput times ``worth`` equals this model's goodput at that batch.
        """
        held = GoodputModel(self.throughput_model, self.noise, batch_size)
        return held, float(self._efficiency(np.array(held.init_batch_size, dtype=np.float64)))

    def best_held(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        batch_size: int | None,
        *,
        max_batch_size: int | None = None,
        atomic_bsz_range: AtomicRange = None,
        accumulation: bool = False,
    ) -> FloatOrArray:
        """Return the goodput at ``batch_size`` [useful samples/s]; if that is None or does not fit, at the best batch.

        `best` chooses the best batch within the limits. The goodput is 0 if no batch fits.
        """
        free, _, _ = self.best(
            nodes, replicas, max_batch_size=max_batch_size, atomic_bsz_range=atomic_bsz_range, accumulation=accumulation
        )
        if batch_size is None:
            return free
        model, worth = self.held_at(batch_size)
        held, _, _ = model.best(nodes, replicas, atomic_bsz_range=atomic_bsz_range, accumulation=accumulation)
        values = np.asarray(held, dtype=np.float64)
        return plain(np.where(values > 0, np.minimum(values * worth, LARGEST), free))

    def _fixed_batch(self, ask: _BatchQuery) -> _BestBatches:
        """Return M0 for each column, split as evenly as possible; goodput is -1 if the shares do not fit."""
        share = np.ceil(self.init_batch_size / ask.replicas)
        k = np.ceil(share / ask.high) if ask.accumulation else np.ones_like(share)
        m = np.ceil(share / k)
        with np.errstate(divide="ignore", over="ignore"):
            seconds = self.throughput_model.step_time_unchecked(ask.nodes, ask.replicas, m, k - 1)
            rate = np.minimum(self.init_batch_size / seconds, LARGEST)
        fits = (m >= ask.low) & (m <= ask.high) & (ask.replicas <= self.init_batch_size)
        return np.where(fits, rate, -1.0), m, k

    def _search(self, ask: _BatchQuery) -> _BestBatches:
        """Return each column's best batch within the limits: a coarse search, then a fine one around its result."""
        # Samples per replica and step, over all k = s + 1 micro-steps.
        most = np.maximum(np.floor(ask.limit / ask.replicas), 1.0)
        least = np.minimum(np.maximum(np.ceil(self.init_batch_size / ask.replicas), ask.low), most)
        # At the same batch more micro-steps are never faster: without a bound in the way there is one.
        split = ask.accumulation and bool((most > ask.high).any())
        most = most if split else np.maximum(np.minimum(most, ask.high), least)
        step = (most / least) ** (1.0 / (_COARSE - 1))
        local = least * step ** np.arange(_COARSE, dtype=np.float64)[:, np.newaxis]
        k, wanted = _candidates(local, least, ask.low, ask.high) if split else (np.ones((1, 1)), local)
        coarse = self._choose(ask, k, wanted)
        _, m, k = coarse
        # For one k log(goodput) is concave in log(m): the best m lies next to the best one tried.
        fine = self._choose(ask, k, m * step ** np.linspace(-1.0, 1.0, _FINE)[:, np.newaxis])
        better = fine[0] > coarse[0]
        value, m, k = (np.where(better, f, c) for f, c in zip(fine, coarse, strict=True))
        return value, m, k

    def _choose(self, ask: _BatchQuery, k: Floats, wanted: Floats) -> _BestBatches:
        """Return the best choice for each column, with m as close to `wanted` as the limits permit."""
        unit = ask.replicas * k
        most = np.floor(ask.limit / unit)
        # Just below M0 where no multiple of `unit` lies between M0 and the limit.
        least = np.maximum(np.minimum(np.ceil(self.init_batch_size / unit), most), ask.low)
        most = np.minimum(most, ask.high)
        m = np.maximum(np.minimum(np.rint(wanted), most), least)
        fits = least <= most
        whole = fits & (unit * m >= self.init_batch_size)
        acceptable = whole | (fits & ~whole.any(axis=0))
        value = np.where(acceptable, self._goodput(ask.nodes, ask.replicas, m, k - 1), -1.0)
        at = value.argmax(axis=0), np.arange(value.shape[1])
        return value[at], m[at], np.broadcast_to(k, m.shape)[at]

    def _throughput(self, n: Floats, r: Floats, m: Floats, s: Floats) -> Floats:
        with np.errstate(divide="ignore", over="ignore"):
            rate = r * m * (s + 1) / self.throughput_model.step_time_unchecked(n, r, m, s)
        return np.minimum(rate, LARGEST)

    def _efficiency(self, batch_size: Floats) -> Floats:
        return self.noise.efficiency_at(batch_size / self.init_batch_size)

    def _goodput(self, n: Floats, r: Floats, m: Floats, s: Floats) -> Floats:
        with np.errstate(over="ignore", under="ignore"):
            batch_size = np.minimum(r * m * (s + 1), LARGEST)
            return np.minimum(self._throughput(n, r, m, s) * self._efficiency(batch_size), LARGEST)


def _candidates(local: Floats, least: Floats, low: float, high: float) -> tuple[Floats, Floats]:
    """Return (k, wanted m) to try for the samples per replica and step in `local`, as columns.

    The candidates are: each entry in as few micro-steps as `high` allows; full micro-steps of `high`, since goodput
    drops after each; both ends of the first few k; and some m from `low` to `high` in as few micro-steps as reach the
    smallest batch, since with few possible batches the other candidates may have no multiple.
    """
    fewest = np.ceil(local / high)
    full = np.maximum(np.floor(local / high), 1.0)
    first = np.ceil(least / high) + np.arange(_ENDS, dtype=np.float64)[:, np.newaxis]
    some = np.rint(np.geomspace(low, min(high, LARGEST / 2), _ENDS))[:, np.newaxis] + np.zeros_like(least)
    fitting = np.maximum(np.ceil(least / some), 1.0)
    k = np.concatenate([fewest, full, first, first, fitting])
    wanted = np.concatenate(
        [local / fewest, np.full_like(full, high), np.zeros_like(first), np.full_like(first, LARGEST), some]
    )
    return k, wanted


def _checked(
    nodes: ArrayLike, replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
) -> tuple[Floats, Floats, Floats, Floats]:
    n, r = resources(nodes, replicas)
    return n, r, reals("atomic_bsz", atomic_bsz, at_least=1), reals("accum_steps", accum_steps, at_least=0)


def _bounds(atomic_bsz_range: AtomicRange) -> tuple[float, float]:
    low, high = atomic_bsz_range or (None, None)
    least = 1 if low is None else _whole("the lower bound of atomic_bsz_range", low)
    most = LARGEST if high is None else _whole("the upper bound of atomic_bsz_range", high)
    if least > most:
        raise ValueError(f"atomic_bsz_range must not be empty (lower <= upper), but got {atomic_bsz_range}")
    return least, most


def _whole(name: str, value: Any) -> int:
    number = real(name, value, at_least=1)
    if number != int(number) or number > _EXACT:
        raise ValueError(f"{name} must be a whole number of samples up to 2**53, but got {value!r}")
    return int(number)
