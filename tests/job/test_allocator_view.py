"""What a job tells the allocator of itself, and what it makes of what it is told: no Ray, no torch."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.tuner import BatchTuner, fit_snapshot
from elastic_ray.job_spec import TrialSpec
from elastic_ray.record.fingerprint import fingerprint
from elastic_ray.record.losses import SizeHistory
from elastic_ray.record.views import allocator_view, wish_note
from elastic_ray.state.progress import PassProgress, RunProgress
from elastic_ray.state.resume_point import ResumePoint
from placement.allocator.significance import trigger_of
from placement.cluster.jobs import FoundStrategy, JobView, Progress
from placement.goodput.forecast import BatchForecast
from placement.goodput.model import GoodputModel, NoiseScale
from placement.knowledge.knowledge import Prior
from tests.job.planners import LIMITS, LOADER, NET, TRUTH, plan, planner_on, report
from tests.job.specs import spec

NOISE = NoiseScale(sqr=1.0, var=20.0)
PRIOR = Prior(model=GoodputModel(TRUTH, NOISE, 64), largest_batch=1024)


def seen(planner: BatchPlanner, resume_point: Any = None, ran_with: int = 2, **fields: Any) -> JobView:
    history = SizeHistory(0.0)
    history.most_workers = ran_with
    return allocator_view(
        spec(**fields),
        planner,
        history,
        resume_point=resume_point,
        submitted_s=0.0,
        held_at=None,
        allocation={"n": 2},
        may_be_stopped=False,
        weight=1.0,
        slow_nodes={},
    )


def fit_now(planner: BatchPlanner, now_s: float) -> Any:
    snapshot = planner.due(now_s)
    assert snapshot is not None
    return planner.fitted(fit_snapshot(snapshot))


def test_strategies_that_won_are_told_with_each_view() -> None:
    planner, choice = planner_on()
    assert seen(planner).strategies == {}
    found = {"0 gloo 2 on 1 ab": FoundStrategy(name="ring", step_s=0.5)}
    planner.observe(report(2, choice, found=found))
    assert seen(planner).strategies == found


# -- progress ------------------------------------------------------------------------------------------------------


def through_json(run: RunProgress) -> RunProgress:
    point = ResumePoint.from_json(json.loads(json.dumps(run.resume_point().to_json())))
    assert point is not None
    return RunProgress.from_resume_point(point)


@example([1.0, 2.5] * 300, 300)
@given(st.lists(st.floats(0.0, 50.0), max_size=600), st.integers(0, 599))
def test_progress_survives_a_checkpoint_anywhere_and_stays_small(gains: list[float], cut: int) -> None:
    """A run that is cut off and continues from its checkpoint ends as one that is not."""
    whole, resumed = RunProgress(epochs=600), RunProgress(epochs=600)
    ends = [0.0]
    for number, gain in enumerate(gains):
        ends.append(ends[-1] + gain)
        if number == cut:
            resumed = through_json(resumed)
        for run in (whole, resumed):
            run.commit_training(gain)
            run.end_epoch()
            told = run.summary()
            assert len(told.epoch_ends) <= 128
            assert told.epochs is not None
            assert list(told.epoch_ends) == ends[run.stride :: run.stride]
            assert run.epoch / 600 >= len(told.epoch_ends) / told.epochs > run.epoch / 600 - 1 / told.epochs
    assert whole.summary() == resumed.summary()


def test_checkpoint_at_end_of_an_epoch_counts_the_epoch() -> None:
    run = RunProgress(epochs=4, passes=[PassProgress(64, True)], done=8.0)
    back = RunProgress.from_resume_point(run.resume_point())
    assert back.summary() == Progress(done=8.0, epoch_ends=(8.0,), epochs=4)
    assert run.summary() == Progress(done=8.0, epochs=4), "the run itself has not continued"


def test_step_whose_update_is_in_model_counts_in_checkpoint() -> None:
    run = RunProgress(passes=[PassProgress(64), PassProgress(8)], done=8.0, steps=5)
    after = run.after(1, 16, 1.5)
    assert (after.done, after.steps, after.passes) == (9.5, 6, [PassProgress(80, hashed=None)])
    assert (run.done, run.steps, len(run.passes)) == (8.0, 5, 2)


def test_progress_is_told_from_the_checkpoint_until_workers_can() -> None:
    planner, choice = planner_on()
    point = RunProgress(epoch=2, epochs=4, done=16.0, epoch_ends=[8.0, 16.0]).resume_point()
    assert seen(planner).progress is None
    assert seen(planner, point).progress == Progress(done=16.0, epoch_ends=(8.0, 16.0), epochs=4)
    planner.observe(report(2, choice))
    assert seen(planner, point).progress == Progress(done=20.0, epochs=4)


def test_a_report_that_comes_late_takes_no_progress_back() -> None:
    planner, choice = planner_on()
    planner.observe(report(2, choice, total_steps=30, progress=Progress(done=30.0)))
    planner.observe(report(2, choice, total_steps=20, progress=Progress(done=20.0)))
    assert seen(planner).progress == Progress(done=30.0)
    planner.observe(report(2, choice, generation=2, total_steps=8, progress=Progress(done=8.0)))
    assert seen(planner).progress == Progress(done=8.0), "a restart from a checkpoint does"


def test_progress_alone_is_no_news_but_a_fingerprint_is() -> None:
    planner, choice = planner_on()
    before = seen(planner)
    planner.observe(report(2, choice))
    assert trigger_of(before, seen(planner)) is None
    assert trigger_of(dataclasses.replace(before, fingerprint=None), before) == "model"


# -- fingerprint ---------------------------------------------------------------------------------------------------


def test_fingerprint_is_of_what_decides_speed_and_nothing_else() -> None:
    one = fingerprint(spec(), LOADER)
    assert one is not None and one.startswith("Net-") and one.endswith(" on 1 CPU")
    other_limits = dataclasses.replace(LOADER, limits=BatchLimits(init_batch_size=8), dataset_size=9)
    assert fingerprint(spec(job="k", max_workers=3), other_limits) == one
    different = [
        fingerprint(spec(bundle={"CPU": 2.0}), LOADER),
        fingerprint(spec(), dataclasses.replace(LOADER, sample="TensorDataset (4,)")),
        fingerprint(spec(), dataclasses.replace(LOADER, models=(NET, NET))),
        fingerprint(spec(), dataclasses.replace(LOADER, models=(dataclasses.replace(NET, details="x"),))),
    ]
    assert len({one, *different}) == 5
    assert fingerprint(spec(), None) is None
    assert fingerprint(spec(), dataclasses.replace(LOADER, models=())) is None


def test_name_of_users_holds_before_the_model_is_built() -> None:
    assert fingerprint(spec(model_fingerprint="resnet18-224"), None) == "resnet18-224 on 1 CPU"
    assert fingerprint(spec(model_fingerprint="resnet18-224"), LOADER) == "resnet18-224 on 1 CPU"


# -- observations --------------------------------------------------------------------------------------------------


def test_observations_are_told_by_type_and_change_rarely() -> None:
    planner, choice = planner_on("T4")
    planner.observe(report(2, choice))
    fit_now(planner, 10.0)
    first = seen(planner)
    assert list(first.observations) == list(first.models) == ["T4"]
    assert first.goodput == first.models["T4"]
    (told,) = first.observations["T4"]
    assert (told.replicas, told.atomic_bsz, told.count) == (2, choice.atomic_bsz, 10.0)
    planner.observe(report(2, choice, total_steps=40, step_time=told.step_time * 1.05))
    fit_now(planner, 20.0)
    assert seen(planner).observations["T4"] is first.observations["T4"], "5 % is no news"
    for number in range(40):
        planner.observe(report(2, choice, total_steps=41 + number, step_time=told.step_time * 1.3))
    fit_now(planner, 30.0)
    assert seen(planner).observations["T4"][0].step_time == pytest.approx(told.step_time * 1.3)


def test_types_are_measured_apart_and_mixed_group_tells_nothing() -> None:
    planner, choice = planner_on("T4")
    planner.observe(report(2, choice))
    fit_now(planner, 10.0)
    there = planner.choose(plan(4, 2), "A100")
    assert there is not None
    assert planner.own_model is None and planner.models, "nothing is known there yet, but here it is"
    planner.observe(report(2, choice, total_steps=25))  # a late one of the old group
    planner.observe(report(4, there, generation=2, total_steps=40, step_time=0.001))
    fit_now(planner, 20.0)
    view = seen(planner)
    assert {gpu: {o.replicas for o in told} for gpu, told in view.observations.items()} == {"T4": {2}, "A100": {4}}
    mixed = planner.choose(plan(4, 3), None)
    assert mixed is not None
    planner.observe(report(4, mixed, generation=3, total_steps=60, step_time=9.0))
    fit_now(planner, 30.0)
    assert seen(planner).observations == view.observations
    assert planner.goodput() is not None, "it adapts its batch all the same"


def test_a_heartbeat_is_small() -> None:
    """Also of a job that has run in 64 configurations for 100 000 epochs."""
    planner, _ = planner_on()
    ends = Progress(done=1e6, epoch_ends=tuple(float(i) for i in range(128)), epochs=1000)
    for workers in range(1, 9):
        for atomic in range(16, 528, 64):
            planner.observe(
                report(workers, BatchChoice(atomic_bsz=atomic), total_steps=workers * 1000 + atomic, progress=ends)
            )
    fit_now(planner, 10.0)
    size = len(pickle.dumps(seen(planner)))
    assert len(seen(planner).observations["T4"]) == 64
    assert size < 8192, size


# -- priors --------------------------------------------------------------------------------------------------------


def test_others_model_serves_until_there_is_an_own_one() -> None:
    tuner = BatchTuner(LIMITS)
    assert tuner.decide(1, 4, None).batch_size == 64
    assert tuner.set_prior(PRIOR) and not tuner.set_prior(PRIOR)
    first = tuner.decide(1, 4, None)
    assert 128 < first.batch_size <= PRIOR.largest_batch, first.reason
    assert tuner.own_model is None and tuner.model == PRIOR.model
    tuner.set_model(GoodputModel(dataclasses.replace(TRUTH, alpha_c=0.5), NOISE, 64))
    assert tuner.model == tuner.own_model != PRIOR.model
    assert not tuner.set_prior(dataclasses.replace(PRIOR, largest_batch=2048)), "its own counts"


def test_a_prior_of_another_initial_batch_is_converted() -> None:
    """var = tr(Sigma) / M0: what was 20 at M0 = 128 is 40 at M0 = 64."""
    tuner = BatchTuner(LIMITS)
    tuner.set_prior(Prior(model=GoodputModel(TRUTH, NOISE, 128), largest_batch=1024))
    assert tuner.model == GoodputModel(TRUTH, NoiseScale(sqr=1.0, var=40.0), 64)


def test_no_batch_is_chosen_beyond_where_others_have_been() -> None:
    tuner = BatchTuner(LIMITS)
    tuner.set_prior(Prior(model=GoodputModel(TRUTH, NoiseScale(sqr=0.0, var=1.0), 64), largest_batch=256))
    assert tuner.decide(1, 4, None).batch_size == 256


def test_planner_is_advised_before_and_after_its_first_group() -> None:
    early = BatchPlanner()
    assert early.advise({"T4": PRIOR}) is None
    early.open(LOADER)
    choice = early.choose(plan(2, 1), "T4")
    assert choice is not None and choice.batch_size(2) > 128
    late, choice = planner_on("T4")
    late.observe(report(2, choice, steps=0))
    change = late.advise({"T4": PRIOR, "A100": PRIOR})
    assert change is not None and change[0].batch_size(2) > 128
    assert late.advise({"T4": PRIOR}) is None
    assert seen(late).goodput is None, "the allocator is told only what the job has measured"


def test_a_trial_begins_with_its_fewest_workers_and_grows() -> None:
    """Of eight trials that come at once, each would have started a second process for nothing."""
    trial = TrialSpec(controller="c")
    assert seen(BatchPlanner(), ran_with=0, trial=trial, min_workers=2).growth_limit == 2
    assert seen(BatchPlanner(), ran_with=2, trial=trial, min_workers=2).growth_limit is None
    assert seen(BatchPlanner(), ran_with=0).growth_limit is None


# -- what policies of the user's ask for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "most", "wished", "note"),
    [
        (None, 8, None, ""),
        ((3, 3), 3, 3, "its policy asks for 3 workers"),
        ((3, None), 8, 3, "its policy asks for 3 workers or more"),
        ((None, 4), 4, None, "its policy asks for 4 workers at most"),
        ((2, 4), 4, 2, "its policy asks for 2 to 4 workers"),
        ((20, 20), 8, 8, "its policy asks for 20 workers"),
    ],
)
def test_wish_bounds_the_most_a_size_by_hand_outranks(
    wish: tuple[int | None, int | None] | None, most: int, wished: int | None, note: str
) -> None:
    planner, choice = planner_on()
    planner.observe(report(2, choice, wish=wish))
    told = seen(planner, max_workers=8)
    assert (told.max_workers, told.wished) == (most, wished)
    assert wish_note(planner) == note
    by_hand = allocator_view(
        spec(max_workers=8),
        planner,
        SizeHistory(0.0),
        resume_point=None,
        submitted_s=0.0,
        held_at=6,
        allocation={},
        may_be_stopped=False,
        weight=1.0,
        slow_nodes={},
    )
    assert (by_hand.max_workers, by_hand.wished, by_hand.held_at) == (8, None, 6)


def test_next_controller_knows_wish_and_batch_from_one_report() -> None:
    before, choice = planner_on()
    before.observe(report(2, choice, wish=(3, None), held_batch=128))
    after, choice = planner_on()
    assert (seen(after).wished, seen(after).held_batch) == (None, None)
    after.observe(report(2, choice, wish=(3, None), held_batch=128, total_steps=40))
    assert (seen(after).wished, seen(after).held_batch) == (seen(before).wished, seen(before).held_batch) == (3, 128)


def test_coming_batches_are_told_where_one_is_held() -> None:
    planner, choice = BatchPlanner(), BatchChoice(atomic_bsz=64)
    planner.open(LOADER)
    planner.choose(plan(2, 1), "")
    coming = ((5_000.0, 256), (9_000.0, 512))
    planner.observe(report(2, choice, held_batch=128, coming=coming))
    assert seen(planner).forecast == BatchForecast(steps=coming)
    planner.observe(report(2, choice, coming=coming, total_steps=40))
    assert seen(planner).forecast is None, "the job chooses its batch by itself again"
    planner.observe(report(2, choice, held_batch=512, total_steps=60))
    assert seen(planner).forecast is None


def test_a_branch_tells_no_length() -> None:
    planner = BatchPlanner()
    planner.open(LOADER)
    planner.choose(plan(2, 1), "")
    planner.observe(report(2, BatchChoice(atomic_bsz=64)))
    assert seen(planner).progress is not None and seen(planner, branch_of="net").progress is None
