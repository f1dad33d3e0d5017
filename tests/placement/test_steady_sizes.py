"""Sizes do not follow noise: scripted speeds that vary by a fifth, through the allocator's brain with two drivers."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Sequence

import pytest

from elastic_ray.batch.limits import BatchLimits
from elastic_ray.batch.tuner import BatchTuner
from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import Allocate, Instruction, JobHeartbeat, NodesChanged, TimePassed
from placement.allocator.snapshot import DecisionRecord, Trigger
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, Progress, TraceJobView
from placement.goodput.fitting import Observation, fit
from placement.goodput.model import GoodputModel, NoiseScale
from placement.policies import GoodputPolicy
from placement.simulator.live import LiveDriver
from placement.simulator.nodes.clusters import parse_cluster
from placement.simulator.nodes.disturbances import Disturbances
from placement.simulator.workloads.profiles import Application
from placement.simulator.workloads.recorded import FittedTimes
from placement.simulator.workloads.traces import TraceJob
from placement.simulator.world.job import SimulatedJob
from placement.simulator.world.rules import LIVE_PACE, LiveRules
from placement.simulator.world.state import World
from tests.placement.views import cluster, model, view

VARIES = 0.2
CAUSES = (Trigger.ARRIVAL, Trigger.END, Trigger.NODES, Trigger.LIMITS)


class Reports:
    """What a job measures of its steps, and tells: each report is off by a fifth, and they drift together."""

    def __init__(self, seed: object, drift: float) -> None:
        self._dice, self._drift, self._off = random.Random(f"steady/{seed}"), drift, 0.0
        self._tuner = BatchTuner(BatchLimits(init_batch_size=64))

    def add(self, nodes: int, workers: int, local: int, step_s: float) -> None:
        fresh = self._dice.gauss(0.0, VARIES)
        self._off = self._drift * self._off + math.sqrt(1 - self._drift**2) * fresh
        step_s *= math.exp(self._off)
        self._tuner.observe(nodes=nodes, replicas=workers, atomic_bsz=local, accum_steps=0, step_time=step_s, steps=10)

    def told(self) -> tuple[Observation, ...]:
        return self._tuner.snapshot().observations


def most_within(seconds: float, log: Iterable[DecisionRecord]) -> int:
    """Most changes of one job's size within this time that nothing but measured speeds caused."""
    changed: dict[str, list[float]] = {}
    for record in log:
        if record.trigger not in CAUSES and record.from_workers != record.to_workers:
            changed.setdefault(record.job, []).append(record.time_s)
    return max((sum(t <= each < t + seconds for each in times) for times in changed.values() for t in times), default=0)


class Script:
    """Three jobs on eight slots, which train at true speeds and tell noisy ones, each second."""

    def __init__(self, seed: int, drift: float) -> None:
        self.core = AllocatorCore(GoodputPolicy(), AllocatorConfig())
        self.core.handle(NodesChanged(cluster=cluster(8)), 0.0)
        self._true = {f"j{k}": model(noise=50.0 * (k + 1)) for k in range(3)}
        self._reports = {job: Reports((seed, job), drift) for job in self._true}
        self._done = dict.fromkeys(self._true, 0.0)
        self._nodes: dict[str, dict[str, int]] = {job: {} for job in self._true}

    def play(self, seconds: int) -> None:
        for now_s in range(1, seconds):
            for job in self._true:
                self._train(job)
                self._obey(self.core.handle(JobHeartbeat(view=self._view(job)), float(now_s)))
            self._obey(self.core.handle(TimePassed(), now_s + 0.5))

    def _train(self, job: str) -> None:
        if workers := sum(self._nodes[job].values()):
            local = 256 // workers
            step_s = float(self._true[job].step_time(len(self._nodes[job]), workers, local, 0))
            self._reports[job].add(len(self._nodes[job]), workers, local, step_s)
            self._done[job] += 0.5 * workers

    def _view(self, job: str) -> JobView:
        told = self._reports[job].told()
        found = GoodputModel(fit(told), self._true[job].noise, 64) if told else None
        return view(
            job,
            allocation=self._nodes[job],
            goodput=found,
            models={"": found} if found else {},
            observations={"": told} if told else {},
            progress=Progress(done=self._done[job], epoch_ends=(), epochs=100.0, usual_epoch=1000.0),
        )

    def _obey(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Allocate):
                self._nodes[each.job] = dict(each.nodes)


@pytest.mark.thorough
@pytest.mark.parametrize("drift", [0.0, 0.95], ids=["each-report-by-itself", "drifting"])
@pytest.mark.parametrize("seed", [0, 1])
def test_noisy_speeds_change_sizes_ever_more_rarely(seed: int, drift: float) -> None:
    script = Script(seed, drift)
    script.play(200)
    assert most_within(60.0, script.core.log) <= 1
    assert most_within(180.0, script.core.log) <= 2, "the second one lasts for two minutes"


class NoisyJob(SimulatedJob):
    """One of the simulator's, whose heartbeats tell noisy speeds."""

    reports: Reports

    def view(self) -> TraceJobView:
        true = super().view()
        if not true.observations or self.training is None:
            return true
        (gpu, seen), now = next(iter(true.observations.items())), self.training
        for each in seen:
            if (each.nodes, each.replicas) == (len(now.nodes), now.workers):
                self.reports.add(each.nodes, each.replicas, round(each.atomic_bsz), each.step_time)
        told = self.reports.told()
        if not told:
            return true
        noisy = GoodputModel(fit(told, fixed_batch=True), NoiseScale(sqr=1.0, var=0.0), 32)
        return dataclasses.replace(true, observations={gpu: told}, models={gpu: noisy}, goodput=noisy)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1])
def test_nor_do_they_in_the_simulator(seed: int) -> None:
    times = {"t4": FittedTimes(model(sync_s=0.05).throughput_model, (1, 64))}
    application = Application.fitted(
        "toy", batch_sizes=(64,), epochs=12, epoch=600.0, noise=NoiseScale(sqr=1.0, var=0.0), step_times=times
    )
    rules, nodes = LiveRules(pause=0.3, start=4.0, slow_sia=False, pace=LIVE_PACE), parse_cluster("t4:1x8")
    jobs: list[SimulatedJob] = []
    for k in range(3):
        trace = TraceJob(name=f"j{k}", time_s=float(k), application="toy", num_replicas=8, batch_size=64)
        job = NoisyJob(trace, application, rules, requested=False, gpus_per_node={"t4": 8}, sigma=0.0, declared=12.0)
        job.reports = Reports((seed, k), 0.9)
        jobs.append(job)
    world = World(jobs, Cluster(), GoodputPolicy(), AllocatorConfig(gather_s=0.0), None)
    world.send(NodesChanged(cluster=nodes), 0.0)
    LiveDriver(world, nodes, Disturbances(), seed, 1e5, LIVE_PACE).run(jobs, None)
    assert max(job.finished_s or 0.0 for job in jobs) > 180.0
    assert most_within(60.0, world.core.log) <= 1
