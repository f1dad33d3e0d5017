"""Planner of a job's batch, based on rank 0's reports of speed and noise (pure)."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from elastic_ray.batch.limits import BatchChoice, BatchLimits, bounded, cut_within
from elastic_ray.batch.reports import LoaderInfo, StepReport, outdated
from elastic_ray.batch.tuner import BatchTuner, TunerSnapshot
from placement.cluster.jobs import FoundStrategy
from placement.goodput.fitting import Observation
from placement.goodput.forecast import NoiseTrend
from placement.goodput.mixed import MixedObservation
from placement.goodput.model import GoodputModel
from placement.knowledge.knowledge import Prior
from placement.text import count

if TYPE_CHECKING:
    from elastic_ray.membership.messages import GenerationSpec

# A fit costs about 20 ms of the controller's thread.
FIT_EVERY_S = 2.0
_GENERATIONS = 8  # whose GPU type is remembered: reports of the last may still be on their way
_RATES = 64
_TELL_SPREAD = 0.02  # change of a spread that is told
_TELL = 0.1  # relative change of a step time that is told


class BatchPlanner:
    """Planner of a job's batch, which collects step reports and keeps a fitted speed model per GPU type.

    The GPU type is the type of the group's nodes. A group on several types has type None, and is measured separately.

    Args:
        shares_by_type: True if workers in a group with several GPU types get shares in proportion to their speeds, so
            that the group's steps measure each type. The batch then stays constant.
    """

    def __init__(self, *, fit_every_s: float = FIT_EVERY_S, shares_by_type: bool = False) -> None:
        self._shares_by_type, self._fit_every_s = shares_by_type, fit_every_s
        self._tuners: dict[str | None, BatchTuner] = {}
        self._gpus: dict[int, str | None] = {}  # of the last generations that a batch was chosen for
        self._gpu: str | None = ""
        self._priors: dict[str, Prior] = {}
        self._told: dict[str, tuple[Observation, ...]] = {}
        self._fitting: tuple[str | None, TunerSnapshot] | None = None
        self._fresh = False
        self._fitted_s = 0.0
        self._choice: BatchChoice | None = None
        self._notice = ""
        self._noticed: set[tuple[str, int]] = set()  # why a batch stayed, and which
        self.held_batch: int | None = None  # global batch that a policy of the user's has set
        self._replicas = 1
        self._before: tuple[BatchChoice | None, int, str | None] = (None, 1, "")
        self._chosen_for = 0
        self._measured: StepReport | None = None  # the latest that saw a step
        self._mixed: tuple[str, ...] = ()  # types of groups with several, those that were fitted longest ago first
        self._strategy: str | None = None  # of the first that did: what is reported to others
        self.loader: LoaderInfo | None = None  # the training loader's limits, None before a worker is ready
        self._unbound: LoaderInfo | None = None  # likewise, without the critical batch
        self.latest: StepReport | None = None
        self.throughput = 0.0
        # last measured throughputs of as many workers with the same batch [samples/s]
        self.rates = collections.deque[float](maxlen=_RATES)
        # the fastest strategies that jobs of the model have found, by the form of the group; None before that is heard
        self.known_strategies: Mapping[str, FoundStrategy] | None = None
        self.trend, self._trained_s = NoiseTrend(), 0.0  # the time is that of measured steps
        self.critical_batch: int | None = None  # largest batch that branches have found to be worth it [samples]
        # whether no rank takes more of a step than others, since more did not fit into its memory
        self.equal_shares = False

    @property
    def model(self) -> GoodputModel | None:
        """Goodput model for the current GPU type, measured by this job or else by other jobs; None if none exists."""
        return self.tuner.model if self.tuner is not None else None

    @property
    def tuner(self) -> BatchTuner | None:
        """Tuner that chooses the batch on the current GPU type; None before the loader is known."""
        return self._tuners.get(self._gpu)

    @property
    def wish(self) -> tuple[int | None, int | None]:
        """Smallest and largest number of workers that the user's policy requests; each is None if not set.

        Every report repeats the request, so that a restarted controller knows it.
        """
        return (self.latest.wish if self.latest is not None else None) or (None, None)

    @property
    def epoch(self) -> int:
        """Current epoch of the workers, according to their latest report; 0 before the first."""
        return self.latest.epoch if self.latest is not None else 0

    @property
    def models(self) -> dict[str, GoodputModel]:
        """Goodput models that the job has measured itself, keyed by GPU type."""
        own = {gpu: tuner.own_model for gpu, tuner in self._tuners.items() if gpu is not None}
        return {gpu: model for gpu, model in own.items() if model is not None}

    @property
    def own_model(self) -> GoodputModel | None:
        """Goodput model that this job measured on the current GPU type, or on the fastest of several; may be None."""
        own = self.tuner.own_model if self.tuner is not None else None
        if own is not None or self._gpu is not None or not self._shares_by_type:
            return own
        speeds, models = self.type_speeds, self.models
        return models[max(speeds, key=lambda gpu: speeds[gpu])] if speeds else None

    @property
    def type_speeds(self) -> dict[str, float]:
        """One worker's samples per second on each measured GPU type, at equal local batch size, keyed by type."""
        samples = self._measured.batch_size / self._measured.replicas if self._measured is not None else 1.0
        each = max(samples, 1.0)
        return {gpu: each / float(model.throughput_model.grad_time(each)) for gpu, model in self.models.items()}

    @property
    def observations(self) -> dict[str, tuple[Observation, ...]]:
        """Step times to share with other jobs, keyed by GPU type; updated only when a time changes by 10 % or more."""
        return dict(self._told)

    @property
    def atomic_bsz_ranges(self) -> dict[str, tuple[int, int]]:
        """Fewest and most samples per worker and micro-step, keyed by GPU type; types without bounds are left out."""
        bounds = {gpu: tuner.atomic_bsz_range for gpu, tuner in self._tuners.items() if gpu is not None}
        return {gpu: (found[0] or 1, found[1] or (1 << 30)) for gpu, found in bounds.items() if found is not None}

    @property
    def noise_scale(self) -> float | None:
        """Simple noise scale [samples] (McCandlish et al. 2018, eq. 2.9); None while unknown."""
        noise = self.latest.noise if self.latest is not None else None
        if noise is None or self.loader is None:
            return None
        return noise.batch_size(self.loader.limits.init_batch_size)

    def speed(self, workers: int | None = None) -> tuple[float, float | None]:
        """Return the throughput [samples/s] and MFU of the latest measured steps; 0 and None while there are none.

        Args:
            workers: Number of workers that the speed must have been measured with; None for any.
        """
        last = self._measured
        known = last is not None and workers in (None, last.replicas)
        return (self.throughput, last.mfu) if known and last is not None else (0.0, None)

    def goodput(self) -> float | None:
        """Return the predicted goodput of the current configuration [samples/s]; None before the first model."""
        report, model = self.latest, self.model
        if model is None or report is None or report.shape is None:
            return None
        shape = report.shape
        return float(model.goodput(report.nodes, report.replicas, shape.atomic_bsz, shape.accum_steps))

    @property
    def efficiency(self) -> float | None:
        """Progress per sample at the current batch / at the initial batch, capped at 1; None without a model."""
        progress = self.progress_per_sample
        return None if progress is None else min(progress, 1.0)

    @property
    def progress_per_sample(self) -> float | None:
        """Progress per sample at the current batch / at the initial batch; above 1 if smaller; None without a model."""
        model, report = self.model, self.latest
        if model is None or report is None or report.batch_size < 1:
            return None
        return float(model.efficiency(report.batch_size))

    def open(self, loader: LoaderInfo | None) -> None:
        """Set the loader whose limits apply; ignored if ``loader`` is None or a loader is already set."""
        if self.loader is not None or loader is None:
            return
        self.loader = self._unbound = loader
        self._bound()
        self._tuner_on(self._gpu, self.loader.limits)

    def _tuner_on(self, gpu: str | None, limits: BatchLimits) -> BatchTuner:
        if gpu not in self._tuners:
            tuner = self._tuners[gpu] = BatchTuner(limits)
            if gpu in self._priors:
                tuner.set_prior(self._priors[gpu])
            if self._measured is not None and self._measured.noise is not None:
                tuner.set_noise(self._measured.noise)
        return self._tuners[gpu]

    def choose(self, group: GenerationSpec, gpu: str | None = "") -> BatchChoice | None:
        """Return how a new generation (group of workers) divides the batch; None before the loader is known."""
        if self.loader is None or self._unbound is None:
            return None
        self._before = (self._choice, self._replicas, self._gpu)
        tuner = self._tuner_on(gpu, self.loader.limits)
        decision = tuner.decide(group.nodes, group.world_size, self._choice, current_replicas=self._replicas)
        choice = decision.choice
        if self.held_batch is not None:
            limits = self._unbound.limits  # a ramp is the user's own word
            choice = bounded(limits, cut_within(limits, self.held_batch, group.world_size), tuner.upper)
        self._choice, self._replicas, self._chosen_for = choice, group.world_size, group.generation
        self._gpu = self._gpus[group.generation] = gpu
        for generation in sorted(self._gpus)[:-_GENERATIONS]:
            del self._gpus[generation]
        return choice

    def recover(self, group: GenerationSpec, gpu: str | None) -> None:
        """Adopt ``group``, the current generation on GPUs of type ``gpu``, with an earlier controller's batch."""
        if self.loader is not None:
            self._tuner_on(gpu, self.loader.limits)
        self._choice, self._replicas, self._chosen_for = group.batch, group.world_size, group.generation
        self._gpu = self._gpus[group.generation] = gpu
        self.equal_shares = group.equal_shares

    def withdraw(self) -> None:
        """Undo the latest :meth:`choose`, unless its generation (group of workers) has already sent a report."""
        if self.latest is not None and self.latest.generation >= self._chosen_for:
            return
        self._choice, self._replicas, self._gpu = self._before

    def advise(self, priors: Mapping[str, Prior]) -> tuple[BatchChoice, str] | None:
        """Record other jobs' models, keyed by GPU type; return a better batch and why, or None for no change."""
        self._priors.update(priors)
        news = [gpu for gpu, prior in priors.items() if gpu in self._tuners and self._tuners[gpu].set_prior(prior)]
        return self._reconsider() if self._gpu in news else None

    def know(self, strategies: Mapping[str, FoundStrategy]) -> bool:
        """Record the fastest strategies found by jobs of the same model, keyed by group form; True if any changed."""
        news = strategies != self.known_strategies
        self.known_strategies = strategies
        return news

    def observe(self, report: StepReport) -> int | None:
        """Record rank 0's report; return the last global batch if the same workers have since changed it, else None."""
        if self.latest is not None and _moment(report) < _moment(self.latest):
            return None  # Ray may deliver calls to an async actor out of order
        self.latest, self.held_batch = report, report.held_batch
        if report.tokens_per_sample is not None:
            self._update_tokens(report.tokens_per_sample)
        if self.tuner is not None and self.tuner.limit_local(report.memory_bound):
            self._choice = report.shape or self._choice  # what they have cut by themselves
        if report.shape is None or report.steps == 0:
            return None
        before, self._measured = self._measured, report
        self._learn(report)
        if before is None or (before.replicas, before.shape) != (report.replicas, report.shape):
            self.rates.clear()
        self.rates.append(self.throughput)
        same = before is not None and before.replicas == report.replicas and before.shape != report.shape
        return before.batch_size if before is not None and same and before.batch_size != report.batch_size else None

    def _update_tokens(self, per_sample: float) -> None:
        """Convert the declared batch again if the loop has counted a different number of tokens per sample."""
        loader = self._unbound
        if loader is None or loader.tokens is None or loader.tokens.per_sample == per_sample:
            return
        tokens, limits = loader.tokens.limits(loader.limits, per_sample, loader.dataset_size)
        self.loader = self._unbound = dataclasses.replace(loader, tokens=tokens, limits=limits)
        self._bound()

    @property
    def unbound_limits(self) -> BatchLimits | None:
        """Batch limits set by the training loader alone, without the critical batch; None before a worker is ready."""
        return None if self._unbound is None else self._unbound.limits

    def set_critical_batch(self, batch_size: int) -> None:
        """Cap the global batch at ``batch_size`` samples (at least the initial M0), replacing any earlier cap."""
        self.critical_batch = batch_size
        self._bound()

    def _bound(self) -> None:
        """Apply the loader's limits, with the critical batch as the maximum if it is smaller."""
        loader, most = self._unbound, self.critical_batch
        if loader is None:
            return
        limits = loader.limits
        if most is not None and limits.max_batch_size is not None:
            bound = max(limits.init_batch_size, min(limits.max_batch_size, most))
            limits = dataclasses.replace(limits, max_batch_size=bound)
        self.loader = dataclasses.replace(loader, limits=limits)
        for tuner in self._tuners.values():
            tuner.limits = limits

    def _learn(self, report: StepReport) -> None:
        """Pass the report to the tuner of the GPU type it was measured on."""
        tuner = self._tuners.get(self._gpus.get(report.generation, self._gpu))
        self.throughput = report.batch_size / report.step_time if report.step_time > 0 else 0.0
        if tuner is None or report.shape is None:
            return
        tuner.set_noise(report.noise)
        self._trained_s += report.steps * report.step_time
        if self.noise_scale is not None:
            self.trend.see(self._trained_s, self.noise_scale)
        tuner.set_signal(report.signal, batch_size=report.batch_size, steps=report.total_steps, loss=report.loss)
        if report.parts and report.step_time > 0:
            self._learn_types(report)
            return
        if report.uneven:
            return  # the model is one of equal shares
        self._strategy = report.strategy if self._strategy is None else self._strategy
        tuner.observe(
            nodes=report.nodes,
            replicas=report.replicas,
            atomic_bsz=report.shape.atomic_bsz,
            accum_steps=report.shape.accum_steps,
            step_time=report.step_time,
            grad_time=report.grad_time,
            steps=report.steps,
            strategy=report.strategy,
        )
        self._fresh = True

    def _learn_types(self, report: StepReport) -> None:
        """Pass the report to the tuners of the GPU types of a mixed group."""
        assert report.shape is not None and self.loader is not None, "steps have been measured"
        seen = MixedObservation(
            parts=report.parts,
            nodes=report.nodes,
            accum_steps=report.shape.accum_steps,
            step_time=report.step_time,
            count=report.steps,
        )
        self._strategy = report.strategy if self._strategy is None else self._strategy
        for gpu, found in seen.by_type().items():
            tuner = self._tuner_on(gpu, self.loader.limits)
            tuner.set_noise(report.noise)
            for each in found:
                tuner.observe(
                    nodes=each.nodes,
                    replicas=each.replicas,
                    atomic_bsz=max(1, round(each.atomic_bsz)),
                    accum_steps=each.accum_steps,
                    step_time=each.step_time,
                    grad_time=each.grad_time,
                    steps=report.steps,
                    strategy=report.strategy,
                )
            self._mixed = self._mixed if gpu in self._mixed else (*self._mixed, gpu)
        self._fresh = True

    def due(self, now_s: float) -> TunerSnapshot | None:
        """Return observations to fit now; None if none are new, or the last fit was less than ``fit_every_s`` ago."""
        if self.tuner is None or not self._fresh or now_s - self._fitted_s < self._fit_every_s:
            return None
        self._fresh, self._fitted_s = False, now_s
        gpu = self._gpu
        if gpu is None and self._mixed:  # one type after the other
            gpu, self._mixed = self._mixed[0], (*self._mixed[1:], self._mixed[0])
        snapshot = self._tuners[gpu].snapshot()
        self._fitting = gpu, snapshot
        return snapshot

    def fitted(self, model: GoodputModel | None) -> tuple[BatchChoice, str] | None:
        """Use a model fitted to :meth:`due`'s snapshot; return a better batch and the reason, or None for no change."""
        if self._fitting is None:
            return None
        gpu, snapshot = self._fitting
        self._tuners[gpu].set_model(model)
        self._log_fit(gpu, snapshot)
        return self._reconsider() if gpu == self._gpu else None

    def close(self) -> None:
        """Close the planner when the job ends, adding measurements since the last fit to :attr:`observations`."""
        for gpu, tuner in self._tuners.items():
            self._log_fit(gpu, tuner.snapshot())

    def _log_fit(self, gpu: str | None, snapshot: TunerSnapshot) -> None:
        measured, first = self._measured, self._strategy
        if measured is not None and first is not None and outdated(first, measured.strategy, same_workers=False):
            return  # set by hand since: what others know the model by has another strategy
        if gpu is not None and snapshot.observations:
            self._told[gpu] = told(self._told.get(gpu, ()), snapshot.observations)

    def _reconsider(self) -> tuple[BatchChoice, str] | None:
        """Return the batch to change to and the reason; None for no change."""
        tuner, report = self.tuner, self.latest
        if tuner is None or report is None or report.shape is None:
            return None
        if report.replicas != self._replicas or tuner.limits.fixed or report.held_batch is not None:
            return None
        decision = tuner.decide(report.nodes, report.replicas, report.shape)
        if decision.hindered and (occasion := (decision.hindered, decision.batch_size)) not in self._noticed:
            self._noticed.add(occasion)
            self._notice = decision.reason
        if not decision.changed or decision.choice == self._choice != report.shape:
            return None
        self._choice = decision.choice
        return decision.choice, f"batch {decision.batch_size}: {decision.reason}"

    def pop_notice(self) -> str:
        """Return the latest notice of why the batch stays unchanged, and clear it; empty if no notice is new."""
        notice, self._notice = self._notice, ""
        return notice

    def out_of_memory(self, atomic_bsz: int, *, more_than_equal: bool = False) -> str:
        """Lower the bound on a worker's samples; return a message, or raise ``BatchDoesNotFitError`` at the minimum.

        Args:
            more_than_equal: The worker had more than an equal share of the step. Shares are then equal from now on, and
                the bound stays, because no batch with equal shares has failed.
        """
        if more_than_equal:
            self.equal_shares = True
            return (
                f"a worker ran out of memory with {count(atomic_bsz, 'sample')}, more than an equal share of the step, "
                "which it took for a slow one: shares are equal from now on"
            )
        if self.tuner is None:
            return "the batch is not known yet"
        return self.tuner.out_of_memory(max(1, atomic_bsz))


def told(before: tuple[Observation, ...], now: Iterable[Observation]) -> tuple[Observation, ...]:
    """Return the measurements ``now``, but keep values from ``before`` that have changed by less than a tenth.

    Medians vary slightly with every report, but measurements that are sent every second should rarely change. Counts
    are reported as 1, 10 or 100.
    """
    known = {_configuration(each): each for each in before}
    fresh = []
    for each in now:
        count = 10.0 ** min(2, int(math.log10(max(each.count, 1.0))))
        old = known.get(_configuration(each))
        same = old is not None and old.count >= count and abs(old.step_time / each.step_time - 1.0) < _TELL
        same = same and old is not None and abs(old.spread - each.spread) < _TELL_SPREAD
        fresh.append(old if same and old is not None else dataclasses.replace(each, count=count))
    fresh.sort(key=_configuration)
    return (
        before
        if len(fresh) == len(before) and all(a is b for a, b in zip(fresh, before, strict=True))
        else tuple(fresh)
    )


def _configuration(observation: Observation) -> tuple[int, int, float, int]:
    return observation.nodes, observation.replicas, observation.atomic_bsz, observation.accum_steps


def _moment(report: StepReport) -> tuple[int, int]:
    return report.generation, report.total_steps
