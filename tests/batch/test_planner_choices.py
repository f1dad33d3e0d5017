"""What a planner chooses and asks for: held and critical batches, generations that come and go, fits that are due."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.batch.tuner import fit_snapshot
from placement.cluster.jobs import FoundStrategy
from placement.knowledge.knowledge import Prior
from tests.job.planners import LIMITS, plan, planner_on, report

SHAPE = BatchChoice(atomic_bsz=32)


def size(planner: BatchPlanner, workers: int, generation: int) -> int:
    """The batch that is chosen for a new generation."""
    choice = planner.choose(plan(workers, generation), "T4")
    assert choice is not None
    return choice.batch_size(workers)


def test_a_held_batch_is_cut_for_any_group() -> None:
    planner, _ = planner_on()
    planner.observe(report(2, SHAPE, held_batch=120))
    assert planner.held_batch == 120
    assert [size(planner, workers, 1 + workers) for workers in (1, 2, 3, 4)] == [120] * 4
    planner.observe(report(2, SHAPE, held_batch=None, total_steps=30))
    assert planner.held_batch is None and size(planner, 2, 9) == 120, "the tuner goes on from there"


def test_held_batches_keep_to_memory_not_critical_batches() -> None:
    limits = BatchLimits(init_batch_size=64, max_batch_size=512)
    planner = BatchPlanner()
    planner.open(LoaderInfo(limits=limits, dataset_size=10_000))
    planner.set_critical_batch(100)
    planner.choose(plan(2, 1), "T4")
    planner.observe(report(2, SHAPE, held_batch=400))
    assert size(planner, 2, 2) == 400, "a ramp is the user's own word"
    planner.out_of_memory(200)
    choice = planner.choose(plan(2, 3), "T4")
    assert choice is not None and choice.atomic_bsz < 200


@pytest.mark.parametrize(("critical", "most"), [(100, 100), (9999, 512), (10, 64)])
def test_the_critical_batch_bounds_the_largest(critical: int, most: int) -> None:
    planner = BatchPlanner()
    planner.set_critical_batch(critical)
    limits = BatchLimits(init_batch_size=64, max_batch_size=512)
    planner.open(LoaderInfo(limits=limits))
    assert planner.loader is not None and planner.loader.limits.max_batch_size == most
    planner.choose(plan(2, 1), "T4")
    assert planner.tuner is not None and planner.tuner.limits.max_batch_size == most
    assert planner.unbound_limits == limits
    planner.set_critical_batch(80)
    assert planner.tuner.limits.max_batch_size == 80 and planner.critical_batch == 80
    planner.open(LoaderInfo(limits=BatchLimits(init_batch_size=1)))
    assert planner.unbound_limits == limits, "the first loader's"
    fixed = BatchPlanner()
    fixed.open(LoaderInfo(limits=BatchLimits(init_batch_size=64)))
    fixed.set_critical_batch(80)
    assert fixed.loader is not None and fixed.loader.limits.max_batch_size is None


def test_late_reports_change_nothing() -> None:
    planner, _ = planner_on()
    for generation, steps, counts in ((1, 20, True), (1, 19, False), (1, 20, True), (2, 5, True), (1, 99, False)):
        told = report(2, SHAPE, generation=generation, total_steps=steps, epoch=generation * 100 + steps)
        planner.observe(told)
        assert (planner.latest is told) is counts
    assert planner.epoch == 205


def test_the_wish_is_that_of_the_latest_report() -> None:
    planner, _ = planner_on()
    assert planner.wish == (None, None) and planner.epoch == 0
    for wish, told in (((2, 3), (2, 3)), (None, (None, None)), ((None, 4), (None, 4))):
        planner.observe(report(2, SHAPE, wish=wish))
        assert planner.wish == told


def test_fits_are_due_after_news_and_their_time() -> None:
    planner = BatchPlanner(fit_every_s=2.0)
    assert planner.due(100.0) is None and planner.fitted(None) is None
    planner.open(LoaderInfo(limits=LIMITS))
    planner.choose(plan(2, 1), "T4")
    assert planner.due(100.0) is None
    planner.observe(report(2, SHAPE))
    assert planner.due(1.9) is None and planner.due(2.0) is not None
    assert planner.due(100.0) is None, "nothing new"
    planner.observe(report(2, SHAPE, total_steps=30, uneven=True))
    assert planner.due(100.0) is None, "unequal shares tell nothing"
    planner.observe(report(2, SHAPE, total_steps=40, steps=0))
    assert planner.due(100.0) is None
    planner.observe(report(2, SHAPE, total_steps=50))
    assert planner.due(3.9) is None and planner.due(4.0) is not None


def test_reports_count_for_the_type_of_their_generation() -> None:
    planner, _ = planner_on("T4")
    for generation in range(2, 9):
        planner.choose(plan(2, generation), "V100")
    planner.observe(report(2, SHAPE, total_steps=10))
    planner.close()
    assert set(planner.observations) == {"T4"}, "the first of eight generations is remembered"
    planner.choose(plan(2, 9), "V100")
    planner.observe(report(2, BatchChoice(atomic_bsz=64), total_steps=20))
    planner.close()
    assert set(planner.observations) == {"T4", "V100"}, "of a forgotten one it counts for the present type"


def test_a_generation_that_was_taken_over_goes_on() -> None:
    planner, _ = planner_on("T4")
    group = dataclasses.replace(plan(2, 5), batch=BatchChoice(atomic_bsz=100), equal_shares=True)
    planner.recover(group, "V100")
    assert planner.equal_shares and planner.tuner is not None
    planner.observe(report(2, BatchChoice(atomic_bsz=100), generation=5))
    planner.choose(plan(3, 6), "T4")
    planner.withdraw()
    planner.observe(report(2, BatchChoice(atomic_bsz=100), generation=5, total_steps=99))
    planner.close()
    assert set(planner.observations) == {"V100"}
    without = BatchPlanner()
    without.recover(group, "V100")
    assert without.tuner is None


def test_what_was_reported_from_is_not_withdrawn() -> None:
    planner, _ = planner_on("T4")
    planner.choose(plan(2, 2), "V100")
    planner.observe(report(2, SHAPE, generation=2))
    planner.withdraw()
    planner.observe(report(2, SHAPE, generation=9, total_steps=99))
    planner.close()
    assert set(planner.observations) == {"V100"}


def test_only_free_batches_on_chosen_workers_are_reconsidered() -> None:
    def change(workers: int = 2, held: int | None = None, limits: BatchLimits = LIMITS) -> bool:
        planner = BatchPlanner()
        planner.open(LoaderInfo(limits=limits, dataset_size=10_000))
        planner.choose(plan(2, 1), "T4")
        planner.observe(report(workers, SHAPE, held_batch=held))
        snapshot = planner.due(100.0)
        assert snapshot is not None
        return planner.fitted(fit_snapshot(snapshot)) is not None

    assert change()
    assert not change(workers=3) and not change(held=64)
    assert not change(limits=BatchLimits(init_batch_size=64))


def test_nothing_is_reconsidered_before_a_step() -> None:
    planner, _ = planner_on()
    planner.observe(report(2, SHAPE))
    snapshot = planner.due(100.0)
    assert snapshot is not None
    planner.observe(dataclasses.replace(report(2, SHAPE, generation=2, steps=0), shape=None))
    model = fit_snapshot(snapshot)
    assert model is not None and planner.fitted(model) is None
    fresh, _ = planner_on()
    assert fresh.advise({"T4": Prior(model=model, largest_batch=512)}) is None, "no report yet"
    planner.observe(report(2, SHAPE, generation=3))
    assert planner.fitted(model) is not None


def test_a_worker_out_of_memory_lowers_or_evens() -> None:
    planner, _ = planner_on()
    assert "shares are equal from now on" in planner.out_of_memory(48, more_than_equal=True)
    assert planner.equal_shares and planner.tuner is not None and planner.tuner.upper == LIMITS.upper
    planner.out_of_memory(48)
    assert planner.tuner.upper is not None and planner.tuner.upper < 48
    assert BatchPlanner().out_of_memory(8) == "the batch is not known yet"


def test_bounds_are_told_by_type_where_there_are_any() -> None:
    for bounds, told in (((None, 32), (1, 32)), ((4, None), (4, 1 << 30))):
        planner = BatchPlanner()
        planner.open(LoaderInfo(limits=BatchLimits(init_batch_size=32, max_batch_size=64, local_bsz_bounds=bounds)))
        planner.choose(plan(2, 1), "T4")
        assert planner.atomic_bsz_ranges == {"": told, "T4": told}


def test_strategies_are_news_once() -> None:
    planner, found = BatchPlanner(), {"a": FoundStrategy(name="ring", step_s=1.0)}
    assert planner.know({}) and not planner.know({})
    assert planner.know(found) and not planner.know(dict(found))
