"""Goodput of a training job on given resources: throughput x statistical efficiency, at its best batch.

Source: Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021,
sections 3.1 (statistical efficiency) and 3.2 (system throughput). This is the only implementation in the
tree: the allocator, the batch tuner and the simulator all ask here.
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
    """Size and noise of a job's gradient at its initial batch size M0; their ratio is the noise scale.

    Both estimate quantities that cannot be negative, but the estimates are unbiased and may be: they are kept
    signed, because smoothing must average them as they are, and count as 0 in `gain`.

    Attributes:
        sqr: Squared norm of the true gradient.
        var: Trace of the covariance of the gradient of one batch of M0 samples, same unit as `sqr`.

    Raises:
        TypeError: one of them is not a real number.
        ValueError: one of them is not finite.
    """

    sqr: float
    var: float

    def __post_init__(self) -> None:
        for name in ("sqr", "var"):
            object.__setattr__(self, name, real(name, getattr(self, name)))

    def gain(self, scale: ArrayLike) -> FloatOrArray:
        """Progress of one step at batch `scale` x M0, in steps at M0::

            gain(scale) = (var + sqr) / (var / scale + sqr)

        It never falls as the scale rises and, from scale 1 on, lies between 1 and `scale`: `scale` itself for
        a gradient of noise alone (sqr = 0), 1 for one without noise (var = 0, or nothing known: both 0).

        Raises:
            TypeError: the scale is not made of real numbers.
            ValueError: a scale is negative or not finite.
        """
        x = reals("scale", scale, at_least=0)
        positive = np.where(x > 0, x, 1.0)
        # Rounding may leave the product an ulp outside the bounds that hold for the formula.
        gain = np.clip(positive * self.efficiency_at(positive), np.minimum(positive, 1.0), np.maximum(positive, 1.0))
        return plain(np.where(x > 0, gain, 0.0 if self.var > 0 else 1.0))

    def efficiency_at(self, scale: Floats) -> Floats:
        """gain(scale) / scale = (var + sqr) / (var + sqr scale), for positive scales and without checks."""
        sqr, var = max(self.sqr, 0.0), max(self.var, 0.0)
        top = max(sqr, var)
        sqr, var = (sqr / top, var / top) if top > 0 else (1.0, 0.0)
        with np.errstate(over="ignore"):
            return np.minimum((var + sqr) / (var + sqr * scale), LARGEST)


@dataclass(frozen=True, slots=True)
class _BatchQuery:
    """Query of `GoodputModel.best`: one column for each pair of nodes and replicas, and the limits."""

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
    """Goodput of a job: samples per second, each counted by what it is worth at the initial batch size M0.

    With batch size M = R m (s + 1)::

        throughput = M / T_step                      samples/s; T_step as in `ThroughputModel`
        efficiency = gain(M / M0) / (M / M0)         in (0, 1] for M >= M0; gain as in `NoiseScale`
        goodput    = throughput x efficiency

    Built as `GoodputModel(throughput, noise, init_batch_size)`; the first is kept as `throughput_model`,
    since `throughput` is what the model answers. Arguments of the methods are as in
    `ThroughputModel.step_time`: scalars give a Python float, arrays broadcast. Results are finite whatever
    the arguments: a rate that is too large for a float is given as the largest float.

    Raises:
        TypeError: an argument is of another type.
        ValueError: init_batch_size is below 1 or not finite.
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
        """Seconds of one optimizer step; see `ThroughputModel.step_time`."""
        return self.throughput_model.step_time(nodes, replicas, atomic_bsz, accum_steps)

    def throughput(
        self, nodes: ArrayLike, replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> FloatOrArray:
        """Samples per second: M / T_step."""
        return plain(self._throughput(*_checked(nodes, replicas, atomic_bsz, accum_steps)))

    def efficiency(self, batch_size: ArrayLike) -> FloatOrArray:
        """Progress per sample at this batch size, relative to M0: gain(M / M0) / (M / M0).

        It never rises with the batch size; below M0 it is above 1.

        Raises:
            TypeError: the batch size is not made of real numbers.
            ValueError: a batch size is below 1 or not finite.
        """
        return plain(self._efficiency(reals("batch_size", batch_size, at_least=1)))

    def goodput(
        self, nodes: ArrayLike, replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> FloatOrArray:
        """Useful samples per second: throughput x efficiency."""
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
        """The batch with the highest goodput: (goodput, atomic_bsz, accum_steps) for each place.

        Every batch lies in [init_batch_size, max_batch_size], with atomic_bsz within its bounds. The search
        tries about a hundred batch sizes in geometric steps and refines the best; it is deterministic. If no
        batch within the limits is a multiple of R (s + 1), the one just below init_batch_size that fits is
        taken. Where nothing fits, goodput, atomic_bsz and accum_steps are 0.

        Args:
            nodes: N, number or array.
            replicas: R, number or array that broadcasts with `nodes`.
            max_batch_size: Limit of M. None: the batch stays exactly M0, split as evenly as can be;
                atomic_bsz is then the largest share, ceil(M0 / R), and goodput M0 / T_step. More replicas
                than samples: 0.
            atomic_bsz_range: Least and largest m, either of which may be None for no bound.
            accumulation: Whether s may be above 0. It is used where a share exceeds the largest m.

        Raises:
            TypeError: an argument is of another type.
            ValueError: max_batch_size is below init_batch_size, or the bounds are empty or below 1.
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
        """For a job that keeps to another batch than M0.

        Returns A model whose only batch this is (``best`` without ``max_batch_size``), and the worth of one of its
        samples: its goodput times the worth is this model's goodput at the batch.

        Raises ValueError: the batch is below 1.
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
        """Goodput at a global batch, at the best one (see `best`) where it does not fit or is None; 0 where none fits.

        Raises:
            TypeError: an argument is of another type.
            ValueError: a batch is below 1, max_batch_size below init_batch_size, or the bounds are empty or below 1.
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
        """M0 itself in each column, split as evenly as can be; goodput is -1 where the shares do not fit."""
        share = np.ceil(self.init_batch_size / ask.replicas)
        k = np.ceil(share / ask.high) if ask.accumulation else np.ones_like(share)
        m = np.ceil(share / k)
        with np.errstate(divide="ignore", over="ignore"):
            seconds = self.throughput_model.step_time_unchecked(ask.nodes, ask.replicas, m, k - 1)
            rate = np.minimum(self.init_batch_size / seconds, LARGEST)
        fits = (m >= ask.low) & (m <= ask.high) & (ask.replicas <= self.init_batch_size)
        return np.where(fits, rate, -1.0), m, k

    def _search(self, ask: _BatchQuery) -> _BestBatches:
        """The best batch of each column within the limits, by coarse steps, then by fine ones around the best."""
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
        """The best choice of each column, with m as near to `wanted` as the limits let it."""
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
    """(k, wanted m) for the samples per replica and step in `local`, in columns.

    Besides each of them in as few micro-steps as `high` allows: full micro-steps of `high`, since goodput
    jumps down after each; the two ends of the first few k; and some m from `low` to `high` in as few micro-steps as
    make up the least batch, since with few batches to choose from others have no multiple.
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
