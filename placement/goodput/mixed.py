"""Throughput of a group of workers on several GPU types, which share the batch according to their speeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from placement.checks import check_number
from placement.goodput.fitting import Observation
from placement.goodput.model import NoiseScale
from placement.goodput.step_time import LARGEST, Floats, ThroughputModel, power_sum
from placement.text import count

_ROUNDS = 60  # of bisection: more than a double has bits
_TRIED = 48  # batch sizes, in geometric steps
_EDGES = 4  # and the largest of so many micro-steps
_WHOLE = 1e-9  # rounding of a quotient that is a whole number


@dataclass(frozen=True, slots=True, kw_only=True)
class TypePart:
    """Part of a group of workers: those on GPUs of one type."""

    gpu: str
    workers: int  # how many, 1 or more
    model: ThroughputModel  # step times of a group of this type alone
    most: int | None = None  # most samples of a worker in one micro-step; None for no bound

    def __post_init__(self) -> None:
        check_number("workers", self.workers, least=1)
        if self.most is not None:
            check_number("most", self.most, least=1, unit="sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedBatch:
    """Best batch for a group on several GPU types, with the resulting goodput."""

    goodput: float  # useful samples per second; 0 where no batch fits, and the rest is 0 or empty then
    batch_size: int = 0  # samples of a step
    accum_steps: int = 0  # micro-steps before the one that synchronises
    # samples of each worker in a micro-step, from the largest on, for each part of the group
    shares: tuple[tuple[int, ...], ...] = ()

    @property
    def smallest_share(self) -> int:
        """Smallest number of samples for any worker in a micro-step; 0 if some worker gets none or no batch fits."""
        return min((min(each) for each in self.shares), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedGroup:
    """Group of workers on GPUs of several types.

    Worker i of type k processes m_i whole samples in a micro-step, at most the type's ``most``, such that the
    micro-step is as short as possible::

        T_grad(m) = min over m_1 + ... + m_R = m of max_i (alpha_c[k] + beta_c[k] m_i)
        T_sync    = max over k of T_sync[k](N, R)
        T_step    = max over k of alpha_s[k] + s T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma)

    with gamma of the type with the largest T_sync. Shares are thus proportional to speeds (exactly so for alpha_c =
    0, except for rounding). A worker whose alpha_c alone exceeds T_grad gets no samples: the group would be faster
    without it. With one type, the model equals ``ThroughputModel``.
    """

    parts: tuple[TypePart, ...]  # the workers by type, one or more
    nodes: int  # N, nodes that they are on, from 1 to the number of workers

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts must hold the workers of one type or more, but got none")
        if not 1 <= self.nodes <= self.workers:
            raise ValueError(f"nodes must lie between 1 and the {count(self.workers)}, but got {self.nodes}")

    @property
    def workers(self) -> int:
        """Total number R of workers, across all types."""
        return sum(part.workers for part in self.parts)

    @property
    def most(self) -> float:
        """Largest micro-batch of the whole group [samples]; infinity if any type has no bound."""
        return sum(math.inf if part.most is None else float(part.workers * part.most) for part in self.parts)

    def grad_time(self, samples: int) -> float:
        """Return the compute time of a micro-step with ``samples`` samples in all [s]; infinity above ``most``."""
        check_number("samples", samples, least=1)
        return float(self._grad_times(np.array([samples], dtype=np.float64))[0][0])

    def shares(self, samples: int) -> tuple[tuple[int, ...], ...]:
        """Return each worker's share of a micro-step of ``samples`` samples, grouped by part, in descending order."""
        check_number("samples", samples, least=1)
        if samples > self.most:
            raise ValueError(f"samples must be at most {self.most:g}, what the workers can take, but got {samples}")
        per_worker = self._grad_times(np.array([samples], dtype=np.float64))[1][:, 0].astype(np.int64)
        shares = [[int(m)] * part.workers for part, m in zip(self.parts, per_worker, strict=True)]
        for _ in range(sum(map(sum, shares)) - samples):
            # What the last sample of the slowest worker costs is what rounding has left over.
            k = max(range(len(shares)), key=lambda k: (self._time(k, max(shares[k])), -k))
            shares[k][shares[k].index(max(shares[k]))] -= 1
        return tuple(tuple(sorted(each, reverse=True)) for each in shares)

    def _time(self, part: int, samples: int) -> float:
        model = self.parts[part].model
        return model.alpha_c + model.beta_c * samples if samples else -1.0

    def sync_time(self) -> float:
        """Return T_sync, the time of one gradient synchronisation [s]."""
        return self._sync()[0]

    def step_time(self, batch_size: int, accum_steps: int = 0) -> float:
        """Return the time of a step of ``accum_steps`` + 1 micro-steps [s]; infinity if the batch exceeds ``most``."""
        check_number("batch_size", batch_size, least=1)
        check_number("accum_steps", accum_steps, least=0)
        micro = np.array([-(-batch_size // (accum_steps + 1))], dtype=np.float64)
        return float(self._step_times(micro, np.array([accum_steps], dtype=np.float64))[0])

    def best(
        self,
        noise: NoiseScale,
        init_batch_size: int,
        *,
        max_batch_size: int | None = None,
        held_batch: int | None = None,
        accumulation: bool = False,
    ) -> MixedBatch:
        """Return the batch with the highest goodput, defined as in ``GoodputModel.best`` and ``best_held``.

        Args:
            max_batch_size: Largest batch [samples]; None keeps the batch at M0.
        """
        check_number("init_batch_size", init_batch_size, least=1, unit="sample")
        low, high = init_batch_size, max(init_batch_size, max_batch_size or init_batch_size)
        edges = [self.most * k for k in range(1, _EDGES + 1) if low <= self.most * k <= high]  # all are full there
        tried = np.unique([*np.rint(np.geomspace(low, high, _TRIED)), *edges])
        for batch in ([] if held_batch is None else [np.array([held_batch], dtype=np.float64)]) + [tried]:
            found = self._best_of(batch, noise, init_batch_size, accumulation)
            if found.goodput > 0:
                return found
        return MixedBatch(goodput=0.0)

    def _best_of(self, batch: Floats, noise: NoiseScale, init_batch_size: int, accumulation: bool) -> MixedBatch:
        """Return the best of the given batch sizes."""
        k = np.ceil(batch / self.most) if self.most < math.inf else np.ones_like(batch)
        micro = np.ceil(batch / k)
        fits = (k == 1.0) | accumulation
        with np.errstate(divide="ignore"):
            rate = batch / self._step_times(micro, k - 1.0) * noise.efficiency_at(batch / init_batch_size)
        value = np.where(fits, np.minimum(rate, LARGEST), 0.0)
        i = int(value.argmax())
        if not value[i] > 0:
            return MixedBatch(goodput=0.0)
        return MixedBatch(
            goodput=float(value[i]),
            batch_size=int(batch[i]),
            accum_steps=int(k[i]) - 1,
            shares=self.shares(int(micro[i])),
        )

    def _step_times(self, micro: Floats, accum_steps: Floats) -> Floats:
        """Return T_step for each micro-step size."""
        grad, _ = self._grad_times(micro)
        sync, gamma = self._sync()
        once = max(part.model.alpha_s for part in self.parts)
        finite = np.isfinite(grad)
        with np.errstate(over="ignore"):
            step = once + accum_steps * grad + power_sum(np.where(finite, grad, 1.0), np.full_like(grad, sync), gamma)
        return np.where(finite, step, np.inf)

    def _sync(self) -> tuple[float, float]:
        """Return T_sync, and the gamma of the type with the largest T_sync."""
        times = [(float(part.model.sync_time(self.nodes, self.workers)), -part.model.gamma) for part in self.parts]
        sync, gamma = max(times)
        return sync, -gamma

    def _grad_times(self, samples: Floats) -> tuple[Floats, Floats]:
        """Return T_grad for each micro-step size, and the most samples for a worker of each type in it, (K, B)."""
        alpha, beta, count = (
            np.array(column, dtype=np.float64)[:, np.newaxis]
            for column in zip(*((p.model.alpha_c, p.model.beta_c, p.workers) for p in self.parts), strict=True)
        )
        most = np.array([math.inf if p.most is None else p.most for p in self.parts])[:, np.newaxis]

        def taken(seconds: Floats) -> Floats:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                fits = np.where(beta > 0, np.floor((seconds - alpha) / beta * (1.0 + _WHOLE) + _WHOLE), np.inf)
            return np.where(seconds >= alpha, np.clip(fits, 0.0, np.minimum(most, samples)), 0.0)

        short, long = np.zeros_like(samples), np.full_like(samples, float((alpha + beta * samples.max()).max()))
        for _ in range(_ROUNDS):
            middle = (short + long) / 2.0
            enough = (count * taken(middle)).sum(axis=0) >= samples
            short, long = np.where(enough, short, middle), np.where(enough, middle, long)
        per_worker = taken(long)
        times = np.where(per_worker > 0, alpha + beta * per_worker, 0.0).max(axis=0)
        return np.where((count * per_worker).sum(axis=0) >= samples, times, np.inf), per_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """Measured times of the workers on one GPU type in the steps of a mixed group."""

    gpu: str
    workers: int  # how many
    atomic_bsz: float  # samples of one of them in a micro-step, above 0
    grad_time: float  # seconds of one of its micro-steps without synchronisation, above 0

    def __post_init__(self) -> None:
        check_number("workers", self.workers, least=1)
        check_number("atomic_bsz", self.atomic_bsz, above=0, unit="samples")
        check_number("grad_time", self.grad_time, above=0, unit="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedObservation:
    """Measured step time of a group on several GPU types."""

    parts: tuple[MeasuredPart, ...]  # what its types took, one or more
    nodes: int  # N
    accum_steps: int  # s
    step_time: float  # seconds of one optimizer step, above 0
    count: float = 1.0  # how many steps the times are a mean of

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts must hold one GPU type or more, but got none")

    def by_type(self) -> dict[str, tuple[Observation, ...]]:
        """Return the measurement as observations keyed by GPU type, for ``fit``.

        A step waits for the slowest type, so its time counts as the time of an equally large group of only that type.
        Every other type gets an observation of a single worker, with T_step equal to T_grad.
        """
        slowest = max(self.parts, key=lambda part: part.grad_time)
        replicas = sum(part.workers for part in self.parts)
        found: dict[str, tuple[Observation, ...]] = {}
        for part in self.parts:
            m, grad_s = max(part.atomic_bsz, 1.0), part.grad_time
            if part is slowest:
                one = Observation(self.nodes, replicas, m, self.accum_steps, self.step_time, grad_s, self.count)
            else:
                one = Observation(1, 1, m, 0, grad_s, grad_s, self.count)
            found[part.gpu] = (*found.get(part.gpu, ()), one)
        return found
