"""Simulated job, which trains according to the true tables but knows only its own measurements."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Mapping

from placement.cluster.jobs import Oracle, Progress, SpotUse, TraceJobView
from placement.cluster.sizes import ANY_SIZE, AllowedSizes
from placement.goodput.fitting import Observation, fit
from placement.goodput.forecast import HOLDS_S, BatchForecast, NoiseTrend
from placement.goodput.mixed import MeasuredPart, MixedGroup, MixedObservation, TypePart
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.step_time import ThroughputModel
from placement.simulator.workloads.profiles import Application
from placement.simulator.workloads.traces import TraceJob
from placement.simulator.world.rules import Location, Rules


def rigid_batch(batch: int, replicas: int, app: Application, most_local: int) -> tuple[int, int]:
    """Return (atomic batch of at most ``most_local``, accumulation steps) of a batch, as the Pollux artifact does."""
    local = math.ceil(batch / replicas - _EPS)
    accum = math.ceil(local / most_local - _EPS) - 1
    if replicas == 1 and batch > app.init_batch_size:
        accum = max(1, accum)
    atomic = math.ceil(local / (accum + 1) - _EPS)
    return max(1, min(atomic, app.max_batch_size // (replicas * (accum + 1)))), accum


@functools.lru_cache(maxsize=4096)
def true_step_s(app: Application, gpu: str, batch: int, most: int, per_node: int) -> tuple[float, ...]:
    """Return the true step time [s] at this global batch on 1, 2, ... ``most`` workers, with ``per_node`` per node."""
    times = []
    for replicas in range(1, most + 1):
        counts = (per_node,) * (replicas // per_node) + ((replicas % per_node,) if replicas % per_node else ())
        atomic, accum = rigid_batch(batch, replicas, app, app.local_bsz_range(gpu)[1])
        step_s, sync_s = app.step_times[gpu].times(counts, atomic)
        times.append(step_s + accum * (step_s - sync_s))
    return tuple(times)


_SINGLE = {"ncf": 32768}
"""Applications that the artifacts run on one GPU at this batch, whatever the scheduler."""
_ALIKE = math.log(1.1)  # local batches closer than this are measured once
_REMEMBER_S = 900.0  # a node that was slow is taken to be so for this long after the job has left it
_EPS = 1e-8
_ALL_NOISE = NoiseScale(sqr=0.0, var=1.0)  # every sample of any batch is worth the same
_SOON_S = 1e-6  # what is foreseen lies ahead by more than rounding, or time would stand still


@functools.lru_cache(maxsize=100_000)  # jobs of one application that grow alike measure, and so fit, the same
def fitted(observations: tuple[Observation, ...], fixed_batch: bool) -> ThroughputModel:
    """Return the throughput model fitted to these measurements."""
    return fit(observations, fixed_batch=fixed_batch)


@functools.lru_cache(maxsize=100_000)  # asked every round, though little changes within an epoch
def best_batch(
    model: GoodputModel, nodes: int, replicas: int, max_batch_size: int, least: int, most: int
) -> tuple[int, int]:
    """Return (atomic batch from ``least`` to ``most``, accumulation steps) of most goodput; batch 0 if none fits."""
    _, atomic_bsz, accum_steps = model.best(
        nodes, replicas, max_batch_size=max_batch_size, atomic_bsz_range=(least, most), accumulation=True
    )
    return int(atomic_bsz), int(accum_steps)


class SimulatedJob:
    """One simulated job: its progress, clock, workers and measurements.

    Args:
        statistical: True if the job knows its statistical efficiency; otherwise it chooses batches, and rates sizes, by
            samples per second alone.
    """

    def __init__(
        self,
        trace: TraceJob,
        application: Application,
        rules: Rules,
        *,
        requested: bool,
        gpus_per_node: Mapping[str, int],
        sigma: float = 0.0,
        seed: int = 0,
        declared: float | None = None,
        statistical: bool = True,
        spot: SpotUse = "prefer",
        mixed_gpu_types: bool = False,
        sizes: AllowedSizes = ANY_SIZE,
        foresight: bool = True,
    ) -> None:
        self.trace, self._sizes, self._foresight = trace, sizes, foresight
        self.app = application
        self.rules, self.requested = rules, requested
        self.location: Location | None = None  # the workers it holds; None while it waits
        # the workers that train: those it holds, or those that stayed while new ones still start
        self.training: Location | None = None
        self.joined_s = math.inf
        self.now_s = 0.0  # its own clock [s], at the end of the last advance
        self.started_s: float | None = None
        self.finished_s: float | None = None  # completion [s], None before
        self.restart_left_s = 0.0
        self.restarts = 0
        self.held_s: dict[str, float] = {}
        self.paused_s = 0.0
        self.epoch = 0
        self.progress = 0.0
        self.atomic_bsz = 0
        self.accum_steps = 0
        self.slowdown = 1.0  # factor on its step times from outside: a slow node, a shared link
        self._sigma = sigma
        self._noisy = random.Random(f"{seed}/{trace.name}")
        # models by GPU type that jobs of the same application know together, where they share
        self.shared: Mapping[str, GoodputModel] = {}
        self._gpus_per_node = dict(gpus_per_node)
        self._declared, self._statistical = declared, statistical
        self._spot: SpotUse = spot
        self.mixed_gpu_types = mixed_gpu_types
        self._mixed: MixedSteps | None = None
        self._slow: dict[str, tuple[float, float]] = {}
        self._last_gpu = ""
        self._epoch_ends: list[float] = []
        self._measured: dict[str, dict[tuple[int, int, int], Observation]] = {}
        self._noise: NoiseScale | None = None
        self._trend, self._trained_s = NoiseTrend(), 0.0
        self._most = 0
        if rules.profiles_types and len(application.step_times) > 1 and not requested:
            self._profile()

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.trace.name

    @property
    def fixed_batch(self) -> int | None:
        """Global batch that the job must keep for now [samples]; None if the batch adapts."""
        if self.trace.ramp and not self.requested:
            return next(batch for begin, batch in reversed(self._ramp) if self.progress >= begin)
        return self.trace.batch_size if self.requested else self.app.fixed_batch or _SINGLE.get(self.app.name)

    def arrive(self, now_s: float) -> None:
        """Set the job's clock to ``now_s``: its arrival time, or the start of the round when it arrived."""
        self.now_s = now_s

    def share(self, models: Mapping[str, GoodputModel]) -> None:
        """Set the models, keyed by GPU type, that jobs of the same application share."""
        self.shared = models

    def place(self, location: Location | None) -> None:
        """Move the job to these workers, or remove all of them if None; the rules set the cost of the change."""
        before, self.location = self.location, location
        self.joined_s = math.inf
        if location is None:
            self.training = None
            return
        change = self.rules.change(self.app.name, before, self.training, location)
        if change.pause_s > 0:
            self.restart_left_s = change.pause_s
        if change.meanwhile is None:
            self.training = location
        else:
            self.training, self.joined_s = change.meanwhile, self.now_s + change.joins_after_s
        self._last_gpu = location.gpu
        if self.started_s is None:
            self.started_s = self.now_s
        else:
            self.restarts += 1
        self._choose_batch()

    def advance(self, seconds: float) -> None:
        """Train for this many seconds on the current workers and advance the job's clock; stops at completion."""
        end_s = self.now_s + seconds
        while self.training is not None and self.finished_s is None and end_s - self.now_s > _EPS:
            if self.now_s >= self.joined_s - _EPS:
                self._join()
            if self.restart_left_s > 0:
                pause_s = min(self.restart_left_s, end_s - self.now_s)
                self.restart_left_s -= pause_s
                self.paused_s += pause_s
                self._spend(pause_s)
            else:
                self._train(min(end_s, self.joined_s) - self.now_s)
        if self.finished_s is None:
            self.now_s = end_s

    def next_s(self) -> float:
        """Return the time of the job's next event (epoch end, batch change, workers joining) [s]; infinity if none."""
        if self.training is None or self.finished_s is not None:
            return math.inf
        missing = self._next_change() - self.progress
        own_s = min(self.now_s + self.restart_left_s + missing / self._rate(), self.joined_s)
        return max(own_s, self.now_s + _SOON_S)

    def leave(self) -> None:
        """Release the finished job's GPUs."""
        self.location = None

    def lose_workers(self) -> None:
        """Lose all workers at once; the job continues from the end of the last epoch."""
        self.progress = self.app.progress_at(self.epoch)
        self.location = self.training = None
        self.joined_s = math.inf

    def see_slow(self, nodes: Mapping[str, float], *, loss: float) -> None:
        """Set the job's slow nodes, each with the factor by which steps take longer on it; the slowest sets the pace.

        After leaving a slow node, the job still reports it for a while, since it measures nothing on it any more.
        ``loss`` is the part of its speed that another job on its nodes' links costs it.
        """
        held = {} if self.location is None else self.location.nodes
        self._slow = {node: seen for node, seen in self._slow.items() if node not in held}
        self._slow |= {node: (factor, math.inf) for node, factor in nodes.items()}
        self.slowdown = max(nodes.values(), default=1.0) / (1.0 - loss)

    def _slow_nodes(self) -> dict[str, float]:
        """Return the slow nodes that the job holds or remembers, with their factors."""
        held = {} if self.location is None else self.location.nodes
        for node, (factor, until_s) in list(self._slow.items()):
            if until_s == math.inf and node not in held:
                self._slow[node] = factor, self.now_s + _REMEMBER_S
            elif until_s <= self.now_s:
                del self._slow[node]
        return {node: factor for node, (factor, _) in sorted(self._slow.items())}

    def _join(self) -> None:
        self.training, self.joined_s = self.location, math.inf
        self.restart_left_s = max(self.restart_left_s, self.rules.join_s)
        self._choose_batch()

    def _train(self, seconds: float) -> None:
        """Make progress for this time, or until the epoch ends."""
        rate = self._rate()
        self._trained_s += seconds
        if self._noise is not None and self._noise.sqr > 0:
            self._trend.see(self._trained_s, self._noise.var / self._noise.sqr)
        change, epoch_end = self._next_change(), self.app.progress_at(self.epoch + 1)
        missing = change - self.progress
        if rate * seconds < missing * (1 - 1e-12):
            self.progress += rate * seconds
            self._spend(seconds)
            self._choose_batch()  # by what it has just measured
            return
        elapsed = missing / rate
        if self.rules.whole_seconds:
            elapsed = float(round(elapsed))
        self._spend(min(elapsed, seconds))
        if change < epoch_end:
            self.progress = change
            self._choose_batch()
        else:
            self._end_epoch()

    @functools.cached_property
    def _ramp(self) -> tuple[tuple[float, int], ...]:
        """Batches of the ramp, each with the progress where it starts to apply."""
        whole = self.app.progress_at(self.app.epochs)
        return tuple((begin * whole, batch) for begin, batch in self.trace.ramp)

    def _next_change(self) -> float:
        """Return the progress when the epoch ends or, if that is earlier, when the ramp changes the batch."""
        end = self.app.progress_at(self.epoch + 1)
        if not self.trace.ramp or self.requested:
            return end
        return min((begin for begin, _ in self._ramp if self.progress < begin < end), default=end)

    def _forecast(self) -> BatchForecast | None:
        """Return the ramp's later batches, each with the samples left until it applies at the current noise scale."""
        if not self._foresight or not self.trace.ramp or self.requested or self._noise is None:
            return None
        steps, samples, done, batch = list[tuple[float, int]](), 0.0, self.progress, self.fixed_batch or 1
        for begin, coming in self._ramp:
            if begin > self.progress:
                samples += (begin - done) * batch / float(self._noise.gain(batch / self.app.init_batch_size))
                steps.append((samples, coming))
                done, batch = begin, coming
        return BatchForecast(steps=tuple(steps)) if steps else None

    def _spend(self, seconds: float) -> None:
        assert self.location is not None, f"{self.name} has no GPUs to hold"
        self.now_s += seconds
        for gpu, workers in self.location.workers_by_type.items():
            self.held_s[gpu] = self.held_s.get(gpu, 0.0) + seconds * workers

    def _end_epoch(self) -> None:
        self.epoch += 1
        self.progress = self.app.progress_at(self.epoch)
        self._epoch_ends.append(self.progress)
        if self.epoch >= self.app.epochs:
            self.finished_s = self.now_s
        else:
            self._choose_batch()

    def _rate(self) -> float:
        """Return scale-invariant iterations per second, and record the measurements from running at this rate."""
        assert self.training is not None, f"{self.name} has no workers to train with"
        counts, gpu = self.training.counts, self.training.gpu
        replicas = self.training.workers
        if self._mixed is not None:
            return self._mixed_rate(self._mixed, counts)
        batch = replicas * self.atomic_bsz * (self.accum_steps + 1)
        step_s, sync_s = self.app.step_times[gpu].times(counts, self.atomic_bsz)
        self._noise, gain = self.app.noise(batch, self.epoch), self.app.gain(batch, self.epoch)
        self._learn(gpu, (len(counts), replicas, self.atomic_bsz), step_s, sync_s)
        self._most = max(self._most, replicas)
        step_s, sync_s = step_s * self.slowdown, sync_s * self.slowdown
        return gain / (step_s + self.accum_steps * (step_s - sync_s)) / self.rules.divisor(self.app.name)

    def _mixed_rate(self, steps: MixedSteps, counts: tuple[int, ...]) -> float:
        """Return the rate on a mix of GPU types."""
        step_s, seen = steps.measure(self.app, counts)
        batch = steps.batch_size
        self._noise, gain = self.app.noise(batch, self.epoch), self.app.gain(batch, self.epoch)
        for gpu, found in seen.by_type().items():
            for each in found:
                key = each.nodes, each.replicas, round(each.atomic_bsz)
                # The slowest type's time covers the others' waiting: what is not its own is synchronisation.
                step = each.step_time - each.accum_steps * each.grad_time
                self._learn(gpu, key, step, max(step - each.grad_time, 0.0))
        self._most = max(self._most, sum(counts))
        return gain / (step_s * self.slowdown) / self.rules.divisor(self.app.name)

    def _learn(self, gpu: str, key: tuple[int, int, int], step_s: float, sync_s: float) -> None:
        """Measure a configuration once, with the configured noise.

        A local batch within a few per cent of one already measured for this shape is skipped, since it would cost a fit
        but not change the model.
        """
        nodes, replicas, local = key
        known = self._measured.setdefault(gpu, {})
        bucket = nodes, replicas, round(math.log(local) / _ALIKE)
        if bucket not in known:
            noise = math.exp(self._noisy.gauss(0.0, self._sigma)) if self._sigma else 1.0
            known[bucket] = Observation(
                nodes,
                replicas,
                local,
                accum_steps=0,
                step_time=step_s * noise,
                grad_time=(step_s - sync_s) * noise,
                spread=self._sigma,
            )

    def _profile(self) -> None:
        """Measure one GPU of every type at a few batches, as Sia does before a job starts."""
        for gpu, table in self.app.step_times.items():
            least, most = self.app.local_bsz_range(gpu)
            for i in range(4):
                local = round(least * (most / least) ** (i / 3))
                self._learn(gpu, (1, 1, local), *table.times((1,), local))
        self._noise = self.app.noise(self.app.init_batch_size, 0)

    def _choose_batch(self) -> None:
        """Set the atomic batch and accumulation: for the fixed batch, else the model's best, else the initial batch."""
        assert self.training is not None, f"{self.name} has no workers to choose a batch for"
        self._mixed = None
        replicas, types = self.training.workers, self.training.workers_by_type
        if len(types) > 1:
            known = {g: model for g in types if (model := self._model(g)) is not None}
            self._mixed = shared_out(self.app, known, self.training, self.fixed_batch)
            return
        gpu = next(iter(types))
        least, most = self.app.local_bsz_range(gpu)
        batch = self.fixed_batch
        shared = self.shared.get(gpu) if self._statistical else None
        model = None if self.requested else shared or self._model(gpu)
        if batch is None and model is not None:
            asked = model, len(self.training.nodes), replicas, self.app.max_batch_size, least, most
            self.atomic_bsz, self.accum_steps = best_batch(*asked)
            if self.atomic_bsz:
                return
        if batch is None:
            batch = max(self.app.init_batch_size, least * replicas)
        if self.trace.ramp and not self.requested:
            batch = max(batch, least * replicas)
        self.atomic_bsz, self.accum_steps = rigid_batch(batch, replicas, self.app, most)

    def _model(self, gpu: str) -> GoodputModel | None:
        """Return the job's fitted model for this GPU type; None if it has none or does not need one."""
        known = self._measured.get(gpu)
        if not known or self._noise is None or self.requested:
            return None  # nothing known, or nothing to decide: a rigid job's batch is given
        noise = self._noise if self._statistical else _ALL_NOISE
        if gpu in self.shared:  # fitted to its own measurements among others, and refreshed with each heartbeat
            return GoodputModel(self.shared[gpu].throughput_model, noise, self.app.init_batch_size)
        fixed = self.app.fixed_batch is not None
        return GoodputModel(fitted(tuple(known.values()), fixed), noise, self.app.init_batch_size)

    def view(self) -> TraceJobView:
        """Return the view that the job sends as its heartbeat; only rigid simulations put ground truth into it."""
        gpu = self._last_gpu or next(iter(self.app.step_times))
        cap = min(self.rules.most_workers, self.app.max_batch_size // self.app.local_bsz_range(gpu)[0])
        if self.app.name in _SINGLE and not self.requested:
            cap = 1
        sizes, least, cap = self._sizes.or_any(1, cap)
        models = {g: model for g in self._measured if (model := self._model(g)) is not None}
        doubled = max(1, 2 * self._most, sizes.at_least(self._most + 1) or 0)
        return TraceJobView(
            job=self.name,
            bundle={"GPU": 1.0},
            min_workers=least,
            sizes=sizes,
            max_workers=max(cap, self.trace.num_replicas) if self.requested else cap,
            submitted_s=self.trace.time_s,
            allocation={} if self.location is None else self.location.nodes,
            most_workers=self._most,
            goodput=models.get(gpu),
            init_batch_size=self.app.init_batch_size,
            max_batch_size=None if self.app.fixed_batch else self.app.max_batch_size,
            held_batch=self.fixed_batch if self.trace.ramp and not self.requested else None,
            forecast=self._forecast(),
            noise_growth=self._trend.growth(HOLDS_S) if self._foresight and self._statistical else 1.0,
            atomic_bsz_range=self.app.local_bsz_range(gpu),
            accumulation=not self.app.fixed_batch,
            resize_cost_s=self.rules.expected_restart_s(self.app.name),
            stop_cost_s=self.rules.expected_stop_s(self.app.name),
            requested_workers=self.trace.num_replicas if self.requested else None,
            growth_limit=None if self.requested or not self.rules.pace.doubling else doubled,
            attained_s=sum(self.held_s.values()),
            restarts=self.restarts,
            fingerprint=self.app.name,
            progress=Progress(done=self.progress, epoch_ends=tuple(self._epoch_ends), epochs=self._declared),
            models=models,
            observations={g: tuple(known.values()) for g, known in self._measured.items()},
            atomic_bsz_ranges={g: self.app.local_bsz_range(g) for g in self.app.step_times},
            oracle=self._oracle(gpu) if self.requested else None,
            slow_nodes=self._slow_nodes(),
            spot=self._spot,
            mixed_gpu_types=self.mixed_gpu_types,
        )

    def _oracle(self, gpu: str) -> Oracle:
        batch = self.trace.batch_size
        most = 1 if self.app.name in _SINGLE else batch // self.app.local_bsz_range(gpu)[0]
        steps = self.app.iterations_at(batch, self.app.epochs - 1) - self.app.iterations_at(batch, self.epoch)
        step_s = true_step_s(self.app, gpu, batch, max(1, min(most, 64)), self._gpus_per_node.get(gpu, 4))
        return Oracle(step_s=step_s, remaining_steps=max(steps, 1.0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedSteps:
    """Division of a step's batch among workers on several GPU types."""

    shares: Mapping[str, tuple[int, ...]]  # samples of each worker in a micro-step, by type, from the largest on
    accum_steps: int  # micro-steps before the one that synchronises

    @property
    def batch_size(self) -> int:
        """Number of samples per step."""
        return sum(map(sum, self.shares.values())) * (self.accum_steps + 1)

    def measure(self, app: Application, counts: tuple[int, ...]) -> tuple[float, MixedObservation]:
        """Return the step time [s] and the job's measurement; all workers wait for the slowest type and link."""
        grads, syncs = dict[str, float](), []
        for gpu, shares in self.shares.items():
            step_s, sync_s = app.step_times[gpu].times(counts, max(shares))
            grads[gpu] = max(step_s - sync_s, 1e-9)
            syncs.append(sync_s)
        grad_s = max(grads.values())
        step_s = grad_s * (self.accum_steps + 1) + max(syncs)
        parts = tuple(
            MeasuredPart(gpu=gpu, workers=len(shares), atomic_bsz=max(shares), grad_time=grads[gpu])
            for gpu, shares in self.shares.items()
        )
        return step_s, MixedObservation(parts=parts, nodes=len(counts), accum_steps=self.accum_steps, step_time=step_s)


def shared_out(
    app: Application, models: Mapping[str, GoodputModel], location: Location, batch_size: int | None
) -> MixedSteps:
    """Return the division of a step's batch among workers on several GPU types that maximises modelled goodput.

    If a type has no model, or a worker would get no samples, all shares are equal. ``models`` are keyed by GPU type.
    ``batch_size`` is the global batch [samples]; None uses the best one, or the initial one if shares are equal.
    """
    workers = location.workers_by_type
    if all(gpu in models for gpu in workers):
        parts = [
            TypePart(gpu=gpu, workers=k, model=models[gpu].throughput_model, most=app.local_bsz_range(gpu)[1])
            for gpu, k in workers.items()
        ]
        best = MixedGroup(parts=tuple(parts), nodes=len(location.nodes)).best(
            next(iter(models.values())).noise,
            app.init_batch_size,
            max_batch_size=app.max_batch_size,
            held_batch=batch_size,
            accumulation=True,
        )
        if best.smallest_share:
            return MixedSteps(shares=dict(zip(workers, best.shares, strict=True)), accum_steps=best.accum_steps)
    most = min(app.local_bsz_range(gpu)[1] for gpu in workers)
    each = -(-(batch_size or app.init_batch_size) // location.workers)
    accum_steps = -(-each // most) - 1
    return MixedSteps(
        shares={gpu: (-(-each // (accum_steps + 1)),) * k for gpu, k in workers.items()}, accum_steps=accum_steps
    )
