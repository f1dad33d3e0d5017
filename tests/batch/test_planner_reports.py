"""What a planner makes of reports: noise, throughput, changes of the batch, and what it tells of them."""

from __future__ import annotations

import pytest

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.batch.tuner import fit_snapshot
from elastic_ray.events import JobPhase
from elastic_ray.membership.machine import JobMembership
from elastic_ray.record.record import JobRecord
from elastic_ray.record.views import job_status
from placement.goodput.model import NoiseScale
from tests.job.planners import LIMITS, plan, planner_on, report
from tests.job.specs import spec
from tests.membership.driver import CONFIG

SHAPE, OTHER = BatchChoice(atomic_bsz=32), BatchChoice(atomic_bsz=64)


@pytest.mark.parametrize("noise", [NoiseScale(sqr=1.0, var=20.0), None])
def test_noise_is_of_the_job_whatever_it_runs_on(noise: NoiseScale | None) -> None:
    planner, _ = planner_on("T4")
    planner.observe(report(2, SHAPE, noise=noise))
    planner.choose(plan(2, 2), "V100")
    assert planner.tuner.snapshot().noise == noise


@pytest.mark.parametrize(
    ("sqr", "var", "scale"), [(2.0, 20.0, 640.0), (1.0, -1.0, 0.0), (0.0, 1.0, None), (-1.0, 1.0, None)]
)
def test_noise_scale_is_in_samples(sqr: float, var: float, scale: float | None) -> None:
    planner, _ = planner_on()
    assert planner.noise_scale is None
    planner.observe(report(2, SHAPE, noise=NoiseScale(sqr=sqr, var=var)))
    assert planner.noise_scale == scale and LIMITS.init_batch_size == 64


def test_another_batch_on_the_same_workers_is_noticed_once() -> None:
    planner, _ = planner_on()
    told = [
        planner.observe(report(2, SHAPE, total_steps=20)),
        planner.observe(report(2, OTHER, total_steps=40)),
        planner.observe(report(2, OTHER, total_steps=60)),
        planner.observe(report(4, SHAPE, generation=2, total_steps=80)),
        planner.observe(report(4, OTHER, generation=2, total_steps=70)),
    ]
    assert told == [None, 64, None, None, None], "also not of more workers, nor of what comes late"
    assert planner.latest.total_steps == 80


def test_throughput_is_remembered_as_long_as_steps_are_alike() -> None:
    planner, _ = planner_on()
    for steps, shape, step_time in ((20, SHAPE, 0.5), (40, SHAPE, 0.25), (60, OTHER, 0.5), (80, OTHER, 0.0)):
        planner.observe(report(2, shape, total_steps=steps, step_time=step_time))
        if steps == 40:
            assert list(planner.rates) == [128.0, 256.0] and planner.throughput == 256.0
    assert list(planner.rates) == [256.0, 0.0]
    planner.observe(report(4, OTHER, generation=2, total_steps=90))
    assert len(planner.rates) == 1


def test_speed_is_of_the_present_number_of_workers() -> None:
    planner, _ = planner_on()
    assert planner.speed() == (0.0, None)
    planner.observe(report(2, SHAPE, step_time=0.5, mfu=0.4))
    planner.observe(report(2, SHAPE, total_steps=21, steps=0, step_time=0.0))
    assert planner.speed(2) == planner.speed() == (128.0, 0.4), "a report without steps says nothing of speed"
    assert planner.speed(4) == (0.0, None)


@pytest.mark.parametrize(
    ("phase", "speed"),
    [
        (JobPhase.PAUSED, (0.0, None, "")),
        (JobPhase.WAITING, (0.0, None, "")),
        (JobPhase.FINISHED, (128.0, 0.4, "nccl")),
    ],
)
def test_jobs_that_do_not_train_show_no_speed(phase: JobPhase, speed: tuple[float, float | None, str]) -> None:
    planner, _ = planner_on()
    planner.observe(report(2, SHAPE, step_time=0.5, mfu=0.4, backend="nccl"))
    record = JobRecord(spec())
    record.phase = phase
    status = job_status(spec(), planner, record, JobMembership(CONFIG), 0.0, 10.0, 0.0)
    assert (status.throughput, status.mfu, status.backend) == speed


def test_efficiency_and_goodput_are_of_the_present_batch() -> None:
    planner, _ = planner_on()
    planner.observe(report(2, SHAPE))
    assert planner.efficiency is None and planner.goodput() is None
    planner.fitted(fit_snapshot(planner.due(100.0)))
    planner.observe(report(2, SHAPE, total_steps=40))
    model = planner.model
    assert planner.efficiency == model.efficiency(64) == 1.0, "it is the first batch"
    assert planner.goodput() == pytest.approx(float(model.goodput(1, 2, 32, 0)))
    planner.observe(report(2, OTHER, total_steps=60))
    assert planner.efficiency == pytest.approx(21 / 22), "a batch twice as large gains (20 + 1) / (20 / 2 + 1)"
    planner.observe(report(2, SHAPE, total_steps=80, batch_size=0))
    assert planner.efficiency is None


@pytest.mark.parametrize(("later", "tells"), [("all_reduce", True), ("int8", False)])
def test_what_is_measured_under_another_strategy_is_not_told(later: str, tells: bool) -> None:
    planner, _ = planner_on()
    planner.observe(report(2, SHAPE, strategy="all_reduce"))
    planner.close()
    before = planner.observations["T4"]
    planner.observe(report(2, OTHER, total_steps=40, strategy=later))
    planner.close()
    assert (planner.observations["T4"] != before) is tells
