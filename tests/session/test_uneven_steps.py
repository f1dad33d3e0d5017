"""Times of steps with unequal shares: told apart, counted as throughput, and kept from the model of equal shares."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.state.progress import PassProgress
from elastic_ray.steps.step import StepClock
from tests.session.steps import step_of

SHAPE = BatchChoice(atomic_bsz=8)


def test_the_clock_does_not_mix_them_with_others() -> None:
    clock = StepClock()
    for uneven in (False, True, False):
        for _ in range(10):
            clock.edge(SHAPE, 1, 32, "", uneven=uneven)
        assert clock.uneven is uneven
        assert 0 < clock.take()[1] < 10, "the first steps after the change do not count"
    for _ in range(10):
        clock.edge(SHAPE, 1, 32, "")
    clock.edge(SHAPE, 1, 32, "", uneven=True)
    assert clock.take()[1] == 0, "what was not taken is dropped with the change"


@pytest.mark.parametrize("uneven", (False, True))
def test_the_planner_learns_from_equal_shares_only(uneven: bool) -> None:
    planner = BatchPlanner()
    planner.open(LoaderInfo(limits=BatchLimits(init_batch_size=32), dataset_size=1000))
    spec = GenerationSpec(generation=1, members=tuple(Member(worker=f"w{k}", node="n") for k in range(4)))
    planner.choose(spec, "T4")
    report = StepReport(
        generation=1,
        nodes=1,
        replicas=4,
        shape=SHAPE,
        steps=20,
        step_time=0.5,
        grad_time=0.0,
        noise=None,
        epoch=0,
        epochs=4,
        total_steps=20,
        batch_size=32,
    )
    planner.observe(dataclasses.replace(report, uneven=uneven))
    assert planner.throughput == pytest.approx(64.0)
    assert (planner.due(1000.0) is None) == uneven


def test_more_than_equal_share_that_failed_makes_shares_equal() -> None:
    planner = BatchPlanner()
    planner.open(LoaderInfo(limits=BatchLimits(init_batch_size=32), dataset_size=1000))
    spec = GenerationSpec(generation=1, members=tuple(Member(worker=f"w{k}", node="n") for k in range(4)))
    cut = planner.choose(spec)
    step = dataclasses.replace(step_of(PassProgress()), sizes=[[10], [10], [10], [2]])
    assert step.equal_bsz == 8 and not planner.equal_shares
    assert "equal from now on" in planner.out_of_memory(10, more_than_equal=True)
    assert planner.equal_shares and planner.choose(spec) == cut
    assert "bound is now 4" in planner.out_of_memory(8), "an equal share that does not fit is cut as before"
    successor = BatchPlanner()
    successor.recover(dataclasses.replace(spec, equal_shares=True), "T4")
    assert successor.equal_shares
