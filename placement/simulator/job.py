"""One simulated job: it trains by the true tables, and knows only what it has measured itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from placement.facts import Oracle, Progress
from placement.fitting import Observation, fit
from placement.goodput import GoodputModel, NoiseScale
from placement.jobs import JobView
from placement.simulator.profiles import Application
from placement.simulator.rules import Rules, Spot
from placement.simulator.tables import StepTimes
from placement.simulator.traces import TraceJob
from placement.throughput import ThroughputModel

_SINGLE = {"ncf": 32768}
"""Applications that the artifacts run on one GPU at this batch, whatever the scheduler."""
_EPS = 1e-8


@functools.lru_cache(maxsize=100_000)  # jobs of one application that grow alike measure, and so fit, the same
def fitted(observations: tuple[Observation, ...]) -> ThroughputModel:
    """The model of these measurements."""
    return fit(observations)


class SimulatedJob:
    """State of one job.

    Args:
        trace: what the user asked for.
        application: what is true of it.
        rules: cost of changes and slow-down.
        requested: run at the trace's batch and count (rigid) instead of adapting the batch.
        gpus_per_node: by GPU type, for the oracle's packed placements.

    Attributes:
        spot: where its workers are; None while it waits.
        now_s: its own clock [s], at the end of the last advance.
        finished_s: completion [s], None before.
    """

    def __init__(
        self,
        trace: TraceJob,
        application: Application,
        rules: Rules,
        *,
        requested: bool,
        gpus_per_node: Mapping[str, int],
    ) -> None:
        self.trace = trace
        self.app = application
        self.rules = rules
        self.requested = requested
        self.spot: Spot | None = None
        self.now_s = 0.0
        self.started_s: float | None = None
        self.finished_s: float | None = None
        self.restart_left_s = 0.0
        self.restarts = 0
        self.held_s: dict[str, float] = {}
        self.paused_s = 0.0
        self.epoch = 0
        self.progress = 0.0
        self.atomic_bsz = 0
        self.accum_steps = 0
        self._gpus_per_node = dict(gpus_per_node)
        self._last_gpu = ""
        self._epoch_ends: list[float] = []
        self._measured: dict[str, dict[tuple[int, int, int], Observation]] = {}
        self._noise: NoiseScale | None = None
        self._most = 0

    @property
    def name(self) -> str:
        """Its name."""
        return self.trace.name

    @property
    def fixed_batch(self) -> int | None:
        """The global batch it may not leave [samples]; None adapts."""
        return self.trace.batch_size if self.requested else _SINGLE.get(self.app.name)

    def place(self, spot: Spot | None) -> None:
        """Give it other workers, or none; progress pauses for as long as the rules say."""
        before, self.spot = self.spot, spot
        if spot is None:
            self.atomic_bsz = 0
            return
        pause_s = self.rules.restart_s(self.app.name, before, spot)
        if pause_s > 0:
            self.restart_left_s = pause_s
        self._last_gpu = spot.gpu
        if self.started_s is None:
            self.started_s = self.now_s
        else:
            self.restarts += 1
        self._choose_batch()

    # Time
    # ------------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass under the present placement; stops at its completion."""
        if self.spot is None or self.finished_s is not None:
            self.now_s += seconds
            return
        pause_s = min(self.restart_left_s, seconds)
        self.restart_left_s -= pause_s
        self.paused_s += pause_s
        self._spend(pause_s)
        seconds -= pause_s
        while seconds > 0 and self.finished_s is None:
            rate = self._rate()
            missing = self.app.progress_at(self.epoch + 1) - self.progress
            if rate * seconds < missing:
                self.progress += rate * seconds
                self._spend(seconds)
                return
            elapsed = min(float(round(missing / rate)), seconds)
            self._spend(elapsed)
            seconds -= elapsed
            self._end_epoch()

    def _spend(self, seconds: float) -> None:
        assert self.spot is not None
        self.now_s += seconds
        self.held_s[self.spot.gpu] = self.held_s.get(self.spot.gpu, 0.0) + seconds * self.spot.workers

    def _end_epoch(self) -> None:
        self.epoch += 1
        self.progress = self.app.progress_at(self.epoch)
        self._epoch_ends.append(self.progress)
        if self.epoch >= self.app.epochs:
            self.finished_s = self.now_s
        else:
            self._choose_batch()

    def _rate(self) -> float:
        """Scale-invariant iterations per second, and what the job learns from running so."""
        assert self.spot is not None
        counts, gpu = self.spot.counts, self.spot.gpu
        replicas = self.spot.workers
        batch = replicas * self.atomic_bsz * (self.accum_steps + 1)
        step_s, sync_s = self._table(gpu).times(counts, self.atomic_bsz)
        self._noise, gain = self.app.noise(batch, self.epoch), self.app.gain(batch, self.epoch)
        known = self._measured.setdefault(gpu, {})
        key = len(counts), replicas, self.atomic_bsz
        if key not in known:
            known[key] = Observation(*key, accum_steps=0, step_time=step_s, grad_time=step_s - sync_s)
            self._most = max(self._most, replicas)
        return gain / (step_s + self.accum_steps * (step_s - sync_s)) / self.rules.divisor(self.app.name)

    def _table(self, gpu: str) -> StepTimes:
        return self.app.step_times[gpu]

    # What it does with its workers
    # ------------------------------------------------------------------------------------------------------------

    def _choose_batch(self) -> None:
        assert self.spot is not None
        replicas, gpu = self.spot.workers, self.spot.gpu
        least, most = self.app.local_bsz_range(gpu)
        batch = self.fixed_batch
        model = self._model(gpu)
        if batch is None and model is not None:
            _, self.atomic_bsz, self.accum_steps = model.best(
                len(self.spot.nodes),
                replicas,
                max_batch_size=self.app.max_batch_size,
                atomic_bsz_range=(least, most),
                accumulation=True,
            )
            if self.atomic_bsz:
                return
        if batch is None:
            batch = max(self.app.init_batch_size, least * replicas)
        self.atomic_bsz, self.accum_steps = rigid_batch(batch, replicas, self.app, most)

    def _model(self, gpu: str) -> GoodputModel | None:
        """What it knows of itself on this GPU type."""
        known = self._measured.get(gpu)
        if not known or self._noise is None or self.requested:
            return None  # nothing known, or nobody to ask: a rigid job's batch is given
        return GoodputModel(fitted(tuple(known.values())), self._noise, self.app.init_batch_size)

    # What it tells
    # ------------------------------------------------------------------------------------------------------------

    def view(self) -> JobView:
        """Its heartbeat: nothing in it is from the tables but the oracle, which only rigid simulations carry."""
        gpu = self._last_gpu or next(iter(self.app.step_times))
        cap = min(self.rules.most_workers, self.app.max_batch_size // self.app.local_bsz_range(gpu)[0])
        if self.app.name in _SINGLE and not self.requested:
            cap = 1
        models = {g: model for g in self._measured if (model := self._model(g)) is not None}
        return JobView(
            job=self.name,
            bundle={"GPU": 1.0},
            max_workers=max(cap, self.trace.num_replicas) if self.requested else cap,
            submitted_s=self.trace.time_s,
            allocation={} if self.spot is None else self.spot.nodes,
            most_workers=self._most,
            goodput=models.get(gpu),
            init_batch_size=self.app.init_batch_size,
            max_batch_size=self.app.max_batch_size,
            atomic_bsz_range=self.app.local_bsz_range(gpu),
            accumulation=True,
            resize_cost_s=self.rules.expected_restart_s(self.app.name),
            requested_workers=self.trace.num_replicas if self.requested else None,
            growth_limit=None if self.requested else max(1, 2 * self._most),
            attained_s=sum(self.held_s.values()),
            restarts=self.restarts,
            fingerprint=self.app.name,
            progress=Progress(done=self.progress, epoch_ends=tuple(self._epoch_ends), epochs=float(self.app.epochs)),
            models=models,
            observations={g: tuple(known.values()) for g, known in self._measured.items()},
            atomic_bsz_ranges={g: self.app.local_bsz_range(g) for g in self.app.step_times},
            oracle=self._oracle(gpu) if self.requested else None,
        )

    def _oracle(self, gpu: str) -> Oracle:
        batch = self.trace.batch_size
        most = 1 if self.app.name in _SINGLE else batch // self.app.local_bsz_range(gpu)[0]
        steps = self.app.iterations_at(batch, self.app.epochs - 1) - self.app.iterations_at(batch, self.epoch)
        step_s = _true_step_s(self.app, gpu, batch, max(1, min(most, 64)), self._gpus_per_node.get(gpu, 4))
        return Oracle(step_s=step_s, remaining_steps=max(steps, 1.0))


def rigid_batch(batch: int, replicas: int, app: Application, most_local: int) -> tuple[int, int]:
    """(atomic batch, accumulation steps) that split a given global batch, by the Pollux artifact's rule."""
    local = math.ceil(batch / replicas - _EPS)
    accum = math.ceil(local / most_local - _EPS) - 1
    if replicas == 1 and batch > app.init_batch_size:
        accum = max(1, accum)
    atomic = math.ceil(local / (accum + 1) - _EPS)
    return max(1, min(atomic, app.max_batch_size // (replicas * (accum + 1)))), accum


@functools.lru_cache(maxsize=4096)
def _true_step_s(app: Application, gpu: str, batch: int, most: int, per_node: int) -> tuple[float, ...]:
    """True seconds of a step at this batch on 1..most workers, packed onto full nodes."""
    times = []
    for replicas in range(1, most + 1):
        counts = (per_node,) * (replicas // per_node) + ((replicas % per_node,) if replicas % per_node else ())
        atomic, accum = rigid_batch(batch, replicas, app, app.local_bsz_range(gpu)[1])
        step_s, sync_s = app.step_times[gpu].times(counts, atomic)
        times.append(step_s + accum * (step_s - sync_s))
    return tuple(times)
