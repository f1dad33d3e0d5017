"""Step times under one strategy are never taken for those under another: clock, reports, fits, fingerprints."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.batch.tuner import BatchTuner, fit_snapshot
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.parallel.model_copy import describe_model
from elastic_ray.steps.step import StepClock
from elastic_ray.sync import AllReduce, Auto, Strategy
from elastic_ray.sync.builders import resolve_strategy
from placement.goodput.model import NoiseScale

SHAPE = BatchChoice(atomic_bsz=8)
LIMITS = BatchLimits(init_batch_size=16, max_batch_size=256)


def steps(clock: StepClock, strategies: list[str | None]) -> int:
    for strategy in strategies:
        clock.edge(SHAPE, 1, 8, strategy)
    return clock.take()[1]


def test_the_clock_counts_steps_of_one_strategy_alone() -> None:
    clock = StepClock()
    assert steps(clock, ["a"] * 13) == 10, "the first, and two that warm up"
    assert clock.strategy == "a"
    assert steps(clock, ["a"] * 10 + ["b"] * 5) == 3 and clock.strategy == "b"
    assert steps(clock, [None] * 10) == 0, "those before the choice began are forgotten with it"
    assert steps(clock, [None] * 10 + ["b"] * 4) == 1
    assert steps(clock, ["b"] * 4) == 4


def observe(tuner: BatchTuner, replicas: int, strategy: str, step_time: float) -> list[tuple[int, float]]:
    tuner.observe(
        nodes=1, replicas=replicas, atomic_bsz=8, accum_steps=0, step_time=step_time, steps=20, strategy=strategy
    )
    return sorted((each.replicas, each.step_time) for each in tuner.snapshot().observations)


def test_strategy_by_hand_makes_all_times_before_it_void() -> None:
    tuner = BatchTuner(LIMITS)
    observe(tuner, 2, "all_reduce-1", 1.0)
    assert observe(tuner, 4, "all_reduce-1", 2.0) == [(2, 1.0), (4, 2.0)]
    assert observe(tuner, 4, "bf16-2", 0.5) == [(4, 0.5)]


def test_a_choice_for_one_group_leaves_those_for_others() -> None:
    tuner = BatchTuner(LIMITS)
    observe(tuner, 2, "auto/parallax-1", 1.0)
    assert observe(tuner, 4, "auto/ps_balanced-2", 2.0) == [(2, 1.0), (4, 2.0)]
    assert observe(tuner, 4, "auto/parallax-1", 1.5) == [(2, 1.0), (4, 1.5)], "chosen anew for four"
    assert observe(tuner, 4, "parallax-1", 1.4) == [(4, 1.4)]


def report(number: int, strategy: str, step_time: float) -> StepReport:
    return StepReport(
        generation=1,
        nodes=1,
        replicas=2,
        shape=SHAPE,
        steps=20,
        step_time=step_time,
        grad_time=0.0,
        noise=NoiseScale(sqr=1.0, var=20.0),
        epoch=0,
        epochs=1,
        total_steps=number,
        batch_size=16,
        strategy=strategy,
    )


@pytest.mark.parametrize(
    "after, known", [("auto/bf16-2", 0.5), ("bf16-2", 1.0)], ids=["chosen again", "by hand: others know the first"]
)
def test_others_are_told_strategy_that_the_job_began_with(after: str, known: float) -> None:
    planner = BatchPlanner()
    planner.open(LoaderInfo(limits=LIMITS))
    members = tuple(Member(worker=str(i), node="here") for i in range(2))
    planner.choose(GenerationSpec(generation=1, members=members), "T4")
    for number, (strategy, step_time) in enumerate([("auto/all_reduce-1", 1.0), (after, 0.5)]):
        planner.observe(report(20 * number, strategy, step_time))
        snapshot = planner.due(10.0 * (number + 1))
        assert snapshot is not None
        planner.fitted(fit_snapshot(snapshot))
    assert [each.step_time for each in planner.observations["T4"]] == [known]
    assert planner.throughput == 16 / 0.5, "the job's own speed is always the latest"


def test_models_under_other_strategies_have_other_fingerprints() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def details(strategy: Any) -> str:
        return describe_model(model, optimizer, amp=False, strategy=strategy).details

    plain = describe_model(model, optimizer, amp=False).details
    assert details(AllReduce()) == plain == details(resolve_strategy("all_reduce"))
    others = [Auto(), Auto(exact=False), resolve_strategy("bf16"), resolve_strategy(Strategy(name="mine"))]
    assert len({plain, *(details(each) for each in others)}) == 5
    assert details(resolve_strategy(Strategy())) == details(resolve_strategy(dataclasses.replace(Strategy())))

    class OfMyOwn:
        def build(self, profile: Any, topology: Any) -> Strategy:
            return Strategy()

    assert details(OfMyOwn()) == details(OfMyOwn()) != plain
