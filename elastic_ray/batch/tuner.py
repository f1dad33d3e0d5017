"""Batch tuner, which records step times and decides when changing the batch is worthwhile.

Pure: it has no clock and no threads, and uses neither Ray nor torch. A fit takes milliseconds to tens of milliseconds.
Callers that must not block a training loop run ``fit_snapshot(tuner.snapshot())`` in a thread and pass the result to
``set_model``.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import OrderedDict, deque

from elastic_ray.batch.growth import MAX_GROWTH, GrowthWatch
from elastic_ray.batch.halving import LEAST_HALF
from elastic_ray.batch.limits import BatchChoice, BatchLimits, cut_within, split
from elastic_ray.batch.reports import NoiseSignal, outdated
from placement.goodput.model import GoodputModel, NoiseScale, Observation, ThroughputModel, fit
from placement.knowledge.knowledge import Prior
from placement.text import count

HYSTERESIS = 0.05
"""Predicted gain in goodput below which the batch stays."""

MIN_STEPS = 8
"""Steps that must have been measured at a global batch before it may grow further."""

LARGE_GAIN = 0.5
"""Predicted gain in goodput from which a decision may take a larger step."""

TRIED_AFTER = 20
"""Steps at the only batch size that was measured, after which a second is tried once."""

TRIED_FACTOR = 1.5

_TELLING, _UNSURE = 5, 0.1  # fewer reports do not tell how much they vary; it is taken to be so much
_REPORTS = 15  # latest reports of a configuration whose median counts
_CONFIGURATIONS = 64  # configurations remembered; the one not seen for longest goes first
_MAX_COUNT = 100  # steps beyond which a configuration weighs no more in a fit


class BatchDoesNotFitError(RuntimeError):
    """Error raised if even the smallest local batch does not fit into a worker's memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecision:
    """Decision on a job's global batch and how it is divided between the workers, with the reason."""

    choice: BatchChoice  # the cut, per worker
    batch_size: int  # the global batch that it makes on the workers it was made for
    reason: str  # why, a sentence
    changed: bool  # whether the global batch or its cut differs from the current one
    goodput: float | None = None  # predicted [samples/s]; None before there is a model
    hindered: str = ""  # in a few words, why it stays whatever the model says; empty where nothing is in the way


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunerSnapshot:
    """Frozen copy of a tuner's observations, for a fit in a thread, a checkpoint, or another process."""

    limits: BatchLimits  # the user's limits
    observations: tuple[Observation, ...] = ()  # median times of each configuration, the latest seen last
    noise: NoiseScale | None = None  # the latest noise scale
    batch_size: int = 0  # global batch of the latest observation, 0 before the first
    steps: int = 0  # steps observed in a row at that batch


def fit_snapshot(snapshot: TunerSnapshot) -> GoodputModel | None:
    """Return the goodput model fitted to the observations; None before the first step or noise scale."""
    if not snapshot.observations or snapshot.noise is None:
        return None
    limits = snapshot.limits
    return GoodputModel(fit(snapshot.observations, fixed_batch=limits.fixed), snapshot.noise, limits.init_batch_size)


@dataclasses.dataclass(slots=True)
class _Record:
    """Latest reports of one configuration, under one strategy."""

    strategy: str = ""
    steps: int = 0
    step_times: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=_REPORTS))
    grad_times: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=_REPORTS))


_Configuration = tuple[int, int, int, int]  # nodes, replicas, atomic_bsz, accum_steps


class BatchTuner:
    """Tuner that collects step times of one job and chooses its batch.

    For each configuration (N nodes, R replicas, m samples, s accumulating micro-steps), the median of the latest
    reports is used. A warm-up, a pause or another tenant's burst therefore has no effect, while a lasting change in
    speed has an effect after a few reports.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._records: OrderedDict[_Configuration, _Record] = OrderedDict()
        self._throughput: ThroughputModel | None = None
        # Nothing needs to be known of the noise where there is one batch.
        self._noise: NoiseScale | None = NoiseScale(sqr=0.0, var=0.0) if limits.one_size else None
        self.upper = limits.upper
        self._batch_size = 0
        self._steps = 0
        self._prior: Prior | None = None
        self._tried = False
        self._watch = GrowthWatch(limits.init_batch_size)

    @property
    def atomic_bsz_range(self) -> tuple[int | None, int | None] | None:
        """Fewest and most samples per worker and micro-step, for ``GoodputModel.best``; None if neither is bounded."""
        lower = None if self.limits.fixed else self.limits.lower
        return None if lower is None and self.upper is None else (lower, self.upper)

    @property
    def model(self) -> GoodputModel | None:
        """Goodput model with the latest fit and noise scale; None if either is missing.

        Until the job has measured a fit or a noise scale, other jobs' values are used.
        """
        prior = self._prior
        throughput = self._throughput or (prior.model.throughput_model if prior else None)
        noise = self._noise or (prior.model.noise if prior else None)
        if throughput is None or noise is None:
            return None
        return GoodputModel(throughput, noise, self.limits.init_batch_size)

    @property
    def own_model(self) -> GoodputModel | None:
        """Goodput model fitted to the job's own measurements; None before the first fit."""
        return None if self._throughput is None else self.model

    def observe(
        self,
        *,
        nodes: int,
        replicas: int,
        atomic_bsz: int,
        accum_steps: int,
        step_time: float,
        grad_time: float = 0.0,
        steps: int = 1,
        strategy: str = "",
    ) -> None:
        """Record a report: mean times over ``steps`` steps of one configuration.

        Args:
            nodes: Number N of nodes with replicas.
            step_time: Seconds per optimizer step; reports that are not finite and above 0 are discarded.
            grad_time: Seconds per micro-step without synchronisation; 0 if not measured.
            strategy: How gradients were synchronised; see ``outdated``.
        """
        if not (math.isfinite(step_time) and step_time > 0) or steps < 1:
            return
        key = (nodes, replicas, atomic_bsz, accum_steps)
        for other, record in list(self._records.items()):
            if outdated(record.strategy, strategy, same_workers=other[:2] == key[:2]):
                del self._records[other]  # the fit stays until there is another
        record = self._records.setdefault(key, _Record(strategy))
        self._records.move_to_end(key)
        record.steps += steps
        record.step_times.append(step_time)
        if math.isfinite(grad_time) and grad_time > 0:
            record.grad_times.append(grad_time)
        if len(self._records) > _CONFIGURATIONS:
            self._records.popitem(last=False)
        batch_size = replicas * atomic_bsz * (accum_steps + 1)
        self._steps = steps + (self._steps if batch_size == self._batch_size else 0)
        self._batch_size = batch_size

    def set_prior(self, prior: Prior) -> bool:
        """Use a model fitted by other jobs until this tuner has its own fit; return True if the tuner's model changes.

        The prior's noise is converted to this job's initial batch M0, because var = tr(Sigma) / M0.
        """
        noise, batch_size = prior.model.noise, self.limits.init_batch_size
        if prior.model.init_batch_size != batch_size:
            noise = NoiseScale(sqr=noise.sqr, var=noise.var * prior.model.init_batch_size / batch_size)
        model = GoodputModel(prior.model.throughput_model, noise, batch_size)
        prior = dataclasses.replace(prior, model=model)
        news, self._prior = self._throughput is None and prior != self._prior, prior
        return news

    def set_noise(self, noise: NoiseScale | None) -> None:
        """Use this smoothed noise scale in the goodput model; None (unknown) keeps the existing noise scale."""
        self._noise = noise or self._noise

    def set_signal(
        self, signal: NoiseSignal | None, *, batch_size: int, steps: int, loss: tuple[int, float] | None = None
    ) -> None:
        """Record the gradient's signal strength after ``steps`` steps of the run, the latest at ``batch_size``.

        ``loss`` is the number of the latest report that had a loss, and that loss; None if no report had one.
        """
        self._watch.observe(batch_size=batch_size, steps=steps, signal=signal, loss=loss)

    def snapshot(self) -> TunerSnapshot:
        """Return a frozen copy of the tuner's observations."""
        return TunerSnapshot(
            limits=self.limits,
            observations=tuple(_observation(*item) for item in self._records.items()),
            noise=self._noise,
            batch_size=self._batch_size,
            steps=self._steps,
        )

    def set_model(self, model: GoodputModel | None) -> None:
        """Use a fitted goodput model; None keeps the existing one. The latest noise scale stays in use."""
        if model is not None:
            self._throughput = model.throughput_model
            self._noise = self._noise or model.noise

    def out_of_memory(self, atomic_bsz: int) -> str:
        """Lower the bound on samples per worker after ``atomic_bsz`` samples did not fit; return a message.

        The new bound is half of ``atomic_bsz``, or the largest smaller local batch that is known to fit. If several
        workers report the same failure, the bound is lowered only once. Call :meth:`decide` afterwards, because the
        current choice may be above the bound.

        Raises BatchDoesNotFitError if the failing batch was the smallest allowed.
        """
        lower = self.limits.least
        failed = f"a worker ran out of memory with {count(atomic_bsz, 'sample')}"
        if atomic_bsz <= lower:
            raise BatchDoesNotFitError(
                f"{failed}, the smallest local batch allowed; "
                + ("" if lower == 1 else "lower batch_size, " if self.limits.per_worker else "lower local_bsz_bounds, ")
                + "use a smaller model or sample, or workers with more memory"
            )
        known = [m for (_, _, m, _), r in self._records.items() if m <= 0.9 * atomic_bsz and r.steps >= MIN_STEPS]
        bound = max([atomic_bsz // 2, lower, *known])
        if self.upper is not None and self.upper <= bound:
            return f"{failed}; the local bound is {self.upper} already"
        self.upper = bound
        return f"{failed}; the local bound is now {bound}"

    def limit_local(self, bound: int | None) -> bool:
        """Lower the bound on samples per worker and micro-step to ``bound``; return True if this lowered it.

        A ``bound`` that is None or not below the existing bound has no effect. A bound below the smallest local batch
        allowed, of a run that began with other limits, counts as that batch.
        """
        bound = None if bound is None else max(bound, self.limits.least)
        if bound is None or (self.upper is not None and self.upper <= bound):
            return False
        self.upper = bound
        return True

    def decide(
        self, nodes: int, replicas: int, current: BatchChoice | None, *, current_replicas: int | None = None
    ) -> BatchDecision:
        """Return the best batch within limits for R = ``replicas`` workers on N = ``nodes`` nodes.

        Args:
            current: The division in use; None before the first.
            current_replicas: Number of workers that use ``current``; None if equal to ``replicas`` (no resize).
        """
        now = self.limits.size_of(current, current_replicas or replicas) if current else 0
        keep = self._keep(replicas, current, now)
        choice, reason = self._choose(nodes, replicas, keep, now)
        model, batch_size = self.model, self.limits.size_of(choice, replicas)
        goodput = None
        if model is not None:
            goodput = float(model.goodput(nodes, replicas, choice.atomic_bsz, choice.accum_steps))
        return BatchDecision(
            choice=choice,
            batch_size=batch_size,
            reason=reason,
            changed=choice != current or batch_size != now,
            goodput=goodput,
            hindered=self._hindered(choice, replicas),
        )

    def _hindered(self, choice: BatchChoice, replicas: int) -> str:
        if self.limits.one_size or self.limits.per_worker:
            return ""
        if self._noise is None and self._has_no_halves(choice, replicas):
            return "no halves"
        return self._watch.hindrance.partition(":")[0].partition(",")[0] if self._watch.is_settled else ""

    def _has_no_halves(self, choice: BatchChoice, replicas: int) -> bool:
        """True if one worker cannot measure the noise of this batch."""
        least = max(LEAST_HALF, self.limits.lower)
        return replicas == 1 and choice.accum_steps == 0 and self.limits.size_of(choice, 1) < 2 * least

    def _choose(self, nodes: int, replicas: int, keep: BatchChoice, now: int) -> tuple[BatchChoice, str]:
        """Return the best batch within reach if its gain exceeds the hysteresis, otherwise ``keep``; and the reason."""
        if self.limits.fixed:
            return keep, f"the batch is fixed at {self.limits.init_batch_size}: {_cut(keep, replicas)}"
        limits, model, stays = self.limits, self.model, f"the batch stays {self.limits.size_of(keep, replicas)}"
        limit = self._limit(now, MAX_GROWTH)
        forced = self._forced(keep, replicas, now)
        if self.limits.one_size or self.limits.per_worker:
            return keep, forced or f"{stays}: it may not be another"
        if (back := self._watch.step_back()) is not None:
            return cut_within(limits, back.batch_size, replicas), back.reason
        if model is None:
            return keep, forced or f"{stays}: {self._missing(keep, replicas)}"
        if self._tries(replicas, keep, limit):
            self._tried = True
            size = min(limit, int(limits.size_of(keep, replicas) * TRIED_FACTOR))
            second = cut_within(limits, size, replicas)
            return second, f"a second batch size is measured: {_cut(second, replicas)}"
        kept = model.goodput(nodes, replicas, keep.atomic_bsz, keep.accum_steps)
        goodput, atomic_bsz, accum_steps = self._best(model, nodes, replicas, limit)
        if self._watch.growth > MAX_GROWTH:
            further = self._best(model, nodes, replicas, self._limit(now, self._watch.growth))
            if further[0] > kept * (1 + LARGE_GAIN):
                goodput, atomic_bsz, accum_steps = further
        if goodput <= 0:
            return keep, forced or f"{stays}: no other batch within the limits fits {count(replicas)}"
        predicted = f"goodput {kept:,.0f} -> {goodput:,.0f} samples/s ({goodput / kept - 1:+.0%})"
        if goodput > kept * (1 + HYSTERESIS):
            best = BatchChoice(atomic_bsz=atomic_bsz, accum_steps=accum_steps)
            return best, f"{predicted} with {_cut(best, replicas)} instead of {_cut(keep, replicas)}"
        hindrance = self._watch.hindrance
        return keep, forced or (
            f"{stays}: {hindrance}"
            if hindrance
            else f"{stays}: {predicted} with the best up to {limit}, not above the hysteresis of {HYSTERESIS:.0%}"
        )

    def _best(self, model: GoodputModel, nodes: int, replicas: int, limit: int) -> tuple[float, int, int]:
        """Return goodput and division of the best batch up to ``limit``."""
        goodput, atomic_bsz, accum_steps = model.best(
            nodes,
            replicas,
            max_batch_size=limit,
            atomic_bsz_range=self.atomic_bsz_range,
            accumulation=self.limits.gradient_accumulation,
        )
        return float(goodput), int(atomic_bsz), int(accum_steps)

    def _missing(self, keep: BatchChoice, replicas: int) -> str:
        """Return which measurement is missing and, if it will not become available by itself, why."""
        if self._noise is not None:
            return "no throughput model yet"
        if self._has_no_halves(keep, replicas):
            return (
                "its gradient noise cannot be measured on one worker, for it has no two halves of "
                f"{max(LEAST_HALF, self.limits.lower)} samples or "
                "more; raise batch_size or lower the least of local_bsz_bounds"
            )
        return "no noise scale yet"

    def _tries(self, replicas: int, keep: BatchChoice, limit: int) -> bool:
        """True if a second batch size should be measured.

        With a single size, half of the step time is assumed to grow with the samples, whatever the truth.
        """
        now = self.limits.size_of(keep, replicas)
        if self._tried or self._batch_size != now or self._steps < TRIED_AFTER or limit <= now or self._noise is None:
            return False
        if len({m for (_, r, m, _) in self._records if r == replicas}) > 1 or self._prior is not None:
            return False
        return (self._noise.batch_size(self.limits.init_batch_size) or 0.0) > now / 2

    def _keep(self, replicas: int, current: BatchChoice | None, now: int) -> BatchChoice:
        """Return the allowed division whose batch is nearest to the current global batch."""
        if self.limits.fixed:
            # More and smaller micro-steps: the batch that the user fixed outlives a shortage of memory.
            return split(self.limits.init_batch_size, replicas, upper=self.upper, accumulation=True)
        one_size, limit = self.limits.one_size, self.limits.max_batch_size
        if current is not None and not one_size and current.batch_size(replicas) == now and self._allows(current, now):
            return current
        wanted = max(now, self.limits.init_batch_size)
        return split(
            wanted if limit is None else min(wanted, limit),
            replicas,
            lower=self.limits.lower,
            upper=self.upper,
            accumulation=self.limits.gradient_accumulation,
            limit=None if one_size else limit,
        )

    def _allows(self, cut: BatchChoice, batch_size: int) -> bool:
        """True if an adaptive batch may have this division: within limits, and not above a size that has failed."""
        limits = self.limits
        return (
            limits.lower <= cut.atomic_bsz <= (self.upper or cut.atomic_bsz)
            and (limits.gradient_accumulation or cut.accum_steps == 0)
            and batch_size <= (limits.max_batch_size or batch_size)
        )

    def _limit(self, now: int, growth: float) -> int:
        """Return the largest global batch for this decision: growth is bounded, and only starts from measured sizes."""
        limits = self.limits
        start = max(now, limits.init_batch_size)
        measured = now > 0 and self._batch_size == now and self._steps >= MIN_STEPS
        limit = int(start * min(growth, self._watch.growth)) if measured else start
        if self._throughput is None and self._prior is not None:
            limit = max(limit, self._prior.largest_batch)  # others have been there
        return limit if limits.max_batch_size is None else min(limit, limits.max_batch_size)

    def _forced(self, keep: BatchChoice, replicas: int, now: int) -> str | None:
        """Return why the batch must change even without a gain; None if it need not."""
        batch_size = self.limits.size_of(keep, replicas)
        wanted = max(now, self.limits.init_batch_size)
        if batch_size == wanted:
            return None
        if batch_size < wanted and self.upper is not None and keep.atomic_bsz == self.upper:
            return f"the batch falls from {wanted} to {_cut(keep, replicas)}: no worker may take more at once"
        return f"the batch of {wanted} becomes {_cut(keep, replicas)}, the nearest cut within the limits"


def _cut(choice: BatchChoice, replicas: int) -> str:
    """Return text such as ``128 = 2 workers x 32 samples x 2 micro-steps``."""
    text = f"{choice.batch_size(replicas)} = {count(replicas)} x {count(choice.atomic_bsz, 'sample')}"
    return text + (f" x {choice.accum_steps + 1} micro-steps" if choice.accum_steps else "")


def _observation(key: _Configuration, record: _Record) -> Observation:
    """Return a configuration's median times, and the spread of its reports."""
    nodes, replicas, atomic_bsz, accum_steps = key
    return Observation(
        nodes=nodes,
        replicas=replicas,
        atomic_bsz=atomic_bsz,
        accum_steps=accum_steps,
        step_time=statistics.median(record.step_times),
        grad_time=statistics.median(record.grad_times) if record.grad_times else 0.0,
        count=float(min(record.steps, _MAX_COUNT)),
        spread=max(
            statistics.pstdev(map(math.log, record.step_times)), _UNSURE if len(record.step_times) < _TELLING else 0.0
        ),
    )
