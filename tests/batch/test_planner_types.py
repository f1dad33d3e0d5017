"""A job on GPUs of several types learns how fast each of them is."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.batch.tuner import fit_snapshot
from elastic_ray.membership.messages import GenerationSpec, Member
from placement.goodput.mixed import MeasuredPart
from placement.goodput.model import NoiseScale

SPEC = GenerationSpec(
    generation=1, members=tuple(Member(worker=f"w{gpu}", node=f"n{gpu}", gpu_type=gpu) for gpu in ("a", "b"))
)


ALONE = GenerationSpec(generation=1, members=(Member(worker="w", node="n", gpu_type="a"),))


def report(batch: int, steps: int) -> StepReport:
    """Steps of one worker on each type: 1 and 3 ms a sample, and 5 ms of synchronisation."""
    parts = (
        MeasuredPart(gpu="a", workers=1, atomic_bsz=0.75 * batch, grad_time=0.75e-3 * batch),
        MeasuredPart(gpu="b", workers=1, atomic_bsz=0.25 * batch, grad_time=0.75e-3 * batch),
    )
    return StepReport(
        generation=1,
        nodes=2,
        replicas=2,
        shape=BatchChoice(atomic_bsz=batch // 2),
        steps=steps,
        step_time=0.75e-3 * batch + 0.005,
        grad_time=0.0,
        noise=NoiseScale(sqr=1.0, var=10.0),
        epoch=0,
        epochs=4,
        total_steps=steps,
        batch_size=batch,
        uneven=True,
        parts=parts,
    )


def test_steps_of_a_mixed_group_tell_of_each_type() -> None:
    planner = BatchPlanner(shares_by_type=True)
    planner.open(LoaderInfo(limits=BatchLimits(init_batch_size=64, max_batch_size=1024), dataset_size=10_000))
    planner.choose(SPEC, None)
    assert planner.own_model is None
    for i, batch in enumerate((64, 128, 256), 1):
        planner.observe(report(batch, 100 * i))
        for now_s in (1000.0 * i, 1000.0 * i + 500):
            snapshot = planner.due(now_s)
            if snapshot is None:
                break
            planner.fitted(fit_snapshot(snapshot))
            planner.observe(report(batch, 100 * i + 1))
    assert set(planner.models) == {"a", "b"}
    speeds = planner.type_speeds
    assert speeds["a"] == pytest.approx(1000.0, rel=0.1)
    assert speeds["b"] == pytest.approx(1000.0 / 3, rel=0.1)
    assert planner.own_model == planner.models["a"]
    assert planner.throughput == pytest.approx(256 / (0.192 + 0.005))


def test_a_types_model_stays_when_the_group_becomes_mixed() -> None:
    planner = BatchPlanner(shares_by_type=True)
    planner.open(LoaderInfo(limits=BatchLimits(init_batch_size=64, max_batch_size=1024), dataset_size=10_000))
    planner.choose(SPEC, None)
    planner.observe(report(64, 100))
    snapshot = planner.due(1000.0)
    assert snapshot is not None
    planner.fitted(fit_snapshot(snapshot))
    model = planner.own_model
    assert model is not None
    planner.choose(SPEC, None)
    assert planner.own_model == model
    apart = BatchPlanner()
    apart.choose(SPEC, None)
    assert apart.own_model is None


def test_what_a_type_measured_and_allows_bears_its_name() -> None:
    planner = BatchPlanner()
    limits = BatchLimits(init_batch_size=64, max_batch_size=1024, local_bsz_bounds=(8, 256))
    planner.open(LoaderInfo(limits=limits))
    planner.choose(ALONE, "a")
    planner.observe(dataclasses.replace(report(64, 100), parts=(), uneven=False, nodes=1, replicas=1))
    planner.close()
    ((gpu, (seen,)),) = planner.observations.items()
    assert (gpu, seen.replicas, seen.atomic_bsz) == ("a", 1, 32)
    assert planner.atomic_bsz_ranges["a"] == (8, 256)


def test_one_sample_or_no_time_has_efficiency_no_throughput() -> None:
    planner = BatchPlanner()
    planner.open(LoaderInfo(limits=BatchLimits(init_batch_size=1, max_batch_size=64)))
    planner.choose(ALONE, "a")
    alone = dataclasses.replace(
        report(64, 100), shape=BatchChoice(atomic_bsz=1), batch_size=1, parts=(), uneven=False, nodes=1, replicas=1
    )
    planner.observe(alone)
    snapshot = planner.due(1000.0)
    assert snapshot is not None
    planner.fitted(fit_snapshot(snapshot))
    assert planner.efficiency == pytest.approx(1.0)
    assert planner.throughput == pytest.approx(1 / alone.step_time)
    planner.observe(dataclasses.replace(alone, total_steps=200, step_time=0.0))
    assert planner.throughput == 0.0


@pytest.mark.parametrize("batch", [16, 64, 256])
def test_efficiency_is_of_the_present_batch(batch: int) -> None:
    """Noise scale B = 64 x 3: (64 + 192) / (M + 192), above the initial batch; not more than all below it."""
    planner = BatchPlanner()
    planner.open(LoaderInfo(limits=BatchLimits(init_batch_size=64, max_batch_size=1024)))
    planner.choose(ALONE, "a")
    noisy = dataclasses.replace(report(64, 100), noise=NoiseScale(sqr=1.0, var=3.0))
    planner.observe(dataclasses.replace(noisy, parts=(), uneven=False, nodes=1, replicas=1))
    snapshot = planner.due(1000.0)
    assert snapshot is not None
    planner.fitted(fit_snapshot(snapshot))
    planner.observe(dataclasses.replace(noisy, batch_size=batch, parts=(), uneven=False, nodes=1, replicas=1))
    assert planner.progress_per_sample == pytest.approx((64 + 192) / (batch + 192))
    assert planner.efficiency == min(1.0, planner.progress_per_sample)
