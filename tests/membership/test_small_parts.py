"""Properties of the small pure parts: who sends state to whom, agreement, resume points, silence, the batch planner."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.batch.tuner import fit_snapshot
from elastic_ray.consensus.intents import agreed_generations_ahead
from elastic_ray.membership.messages import GenerationSpec, Member, StateVersion, transfer_rounds
from elastic_ray.state.progress import PassProgress, RunProgress
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.worker_group.failure_detector import FailureDetector
from placement.goodput.model import NoiseScale

# -- transfer_rounds -----------------------------------------------------------------------------------------------

ranks = st.builds(
    StateVersion,
    step=st.integers(0, 3),
    optimizers_stepped=st.integers(0, 2),
    lineage=st.integers(0, 1),
    passes=st.integers(0, 1),
    has_state=st.booleans(),
)


@given(st.lists(ranks, min_size=1, max_size=20))
def test_everyone_ends_with_the_furthest_state_in_fewest_rounds(progress: list[StateVersion]) -> None:
    furthest = max(p.order() for p in progress)
    if furthest[0]:
        holds = {rank for rank, p in enumerate(progress) if p.order() == furthest}
    else:
        holds = {0}
    passes = max(progress[rank].passes for rank in holds)
    senders = {rank for rank in holds if progress[rank].passes == passes}
    begun, idle = len(senders), len(holds - senders)
    rounds = transfer_rounds(progress)
    for served in rounds:
        busy = [rank for pair in served for rank in pair]
        assert len(busy) == len(set(busy)), "a rank sends to one or receives from one at a time"
        assert {source for source, _ in served} <= senders, "who sends has left the pass that others have left"
        assert not {destination for _, destination in served} & holds, "nobody receives twice"
        holds |= {destination for _, destination in served}
        senders |= {destination for _, destination in served}
    assert holds == set(range(len(progress)))
    # the number that has it can at most double
    assert len(rounds) == math.ceil(math.log2((len(progress) - idle) / begun))


@given(st.lists(ranks, min_size=1, max_size=20))
def test_all_ranks_draw_up_the_same_transfers(progress: list[StateVersion]) -> None:
    assert transfer_rounds(progress) == transfer_rounds(tuple(progress))


def test_a_newcomer_never_sends_to_holders_else_rank_0() -> None:
    newcomer, holder = StateVersion(step=9), StateVersion(step=1, has_state=True)
    assert transfer_rounds([newcomer, holder]) == [[(1, 0)]]
    assert transfer_rounds([newcomer, newcomer, newcomer, newcomer]) == [[(0, 1)], [(0, 2), (1, 3)]]
    assert transfer_rounds([holder, holder]) == []
    through = StateVersion(step=1, passes=1, has_state=True)
    assert transfer_rounds([holder, through, newcomer]) == [[(1, 2)]], "it would stay in a pass that is over"
    later = StateVersion(step=1, lineage=4, has_state=True)
    assert transfer_rounds([holder, later]) == [[(1, 0)]], "two groups continued from one step: the later one counts"


# -- agreed_generations_ahead --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 60), min_size=1, max_size=64))
def test_a_distance_is_agreed_on_exactly_when_all_have(distances: list[int]) -> None:
    common = distances[0] if len(set(distances)) == 1 else 0
    assert (
        agreed_generations_ahead(float(sum(distances)), float(sum(d * d for d in distances)), len(distances)) == common
    )


@given(ahead=st.integers(1, 60), world=st.integers(2, 64), other=st.integers(0, 60))
def test_one_rank_that_differs_is_enough_to_disagree(ahead: int, world: int, other: int) -> None:
    distances = [ahead] * (world - 1) + [other]
    sums = float(sum(distances)), float(sum(d * d for d in distances))
    assert agreed_generations_ahead(*sums, world) == (ahead if other == ahead else 0)


# -- RunProgress ---------------------------------------------------------------------------------------------------

passes = st.lists(st.builds(PassProgress, position=st.integers(0, 100), done=st.booleans()), max_size=3)
runs = st.builds(
    RunProgress,
    epoch=st.integers(0, 9),
    passes=passes,
    steps=st.integers(0, 99),
    reports=st.integers(0, 9),
    loader_steps=st.integers(0, 99),
    ended_passes=st.integers(0, 9),
    optimizers_stepped=st.integers(0, 2),
)


@given(runs)
def test_a_resume_point_survives_json_and_comes_back(run: RunProgress) -> None:
    point = ResumePoint.from_json(json.loads(json.dumps(run.resume_point(samples_left=3).to_json())))
    assert point == run.resume_point(samples_left=3)
    back = RunProgress.from_resume_point(point)
    ended = bool(run.passes) and all(each.done for each in run.passes)
    assert back.epoch == run.epoch + ended
    passes = [PassProgress(each.position, each.done, None if each.position else 0) for each in run.passes]
    assert back.passes == ([] if ended else passes)
    assert (back.steps, back.reports) == (run.steps, run.reports)
    assert (back.loader_steps, back.optimizers_stepped, back.ended_passes) == (0, 0, 0)  # they order living ranks only
    assert back.resume_point() == run.resume_point()


def test_a_resume_point_needs_only_its_epoch() -> None:
    assert ResumePoint.from_json({"epoch": 3}) == ResumePoint(epoch=3)
    assert ResumePoint.from_json({}) is None, "it says nothing"


@given(runs)
def test_a_state_is_read_as_it_was(run: RunProgress) -> None:
    assert RunProgress.from_state(run.to_state()) == run


# -- FailureDetector -------------------------------------------------------------------------------------------------


def silent_after(detector: FailureDetector, times: list[float], members: list[str]) -> list[str]:
    return [worker for now_s in times for worker, _ in detector.silent(now_s, members)]


def test_a_member_silent_for_longer_than_timeout_is_named() -> None:
    detector = FailureDetector(2.0)
    detector.silent(100.0, [])
    detector.heard("a")
    detector.heard("b")
    ticks = [100.0 + 0.1 * i for i in range(1, 20)]
    assert not silent_after(detector, ticks, ["a", "b"])
    detector.heard("a")
    ((worker, silence_s),) = detector.silent(102.15, ["a", "b", "never heard of"])
    assert worker == "b"
    assert silence_s == pytest.approx(2.15)
    assert not detector.silent(102.2, ["a"])  # only members count
    detector.discard("b")
    assert not detector.silent(102.3, ["a", "b"])


def test_a_worker_nobody_waits_for_may_be_silent_longer() -> None:
    detector = FailureDetector(2.0, alone_s=30.0)
    detector.silent(0.0, [])
    detector.heard("a", "b")
    times = [0.2 * i for i in range(1, 200)]
    assert not silent_after(detector, times[:40], ["a"])
    assert set(silent_after(detector, times[40:41], ["a", "b"])) == {"a", "b"}
    assert silent_after(detector, times[41:], ["a"])


def test_who_was_seen_to_live_is_waited_for() -> None:
    detector = FailureDetector(2.0, alone_s=30.0)
    detector.silent(0.0, [])
    detector.heard("a", "b")
    times = [0.2 * i for i in range(1, 400)]
    assert not silent_after(detector, times[:6], ["a", "b"])
    assert detector.questionable() == ["a", "b"]
    assert detector.questionable() == []
    detector.excuse("a")
    assert set(silent_after(detector, times[6:20], ["a", "b"])) == {"b"}
    detector.heard("a")
    detector.excuse("a")  # an answer that came too late
    assert not detector.questioned("a")
    assert set(silent_after(detector, times[20:28], ["a"])) == set()
    assert "a" in silent_after(detector, times[28:40], ["a", "b"])


def test_the_controllers_own_pauses_are_no_silence_of_workers() -> None:
    detector = FailureDetector(2.0)
    detector.silent(0.0, ["a"])
    detector.heard("a")
    assert not detector.silent(60.0, ["a"])  # it was held up for a minute, and so were the messages
    assert not detector.silent(10.0, ["a"])  # a clock that goes back is no silence either


@given(st.lists(st.floats(0.0, 5.0), max_size=40), st.floats(0.5, 5.0))
def test_silence_never_exceeds_time_speakers_are_never_silent(gaps: list[float], timeout_s: float) -> None:
    detector, now_s, heard_s = FailureDetector(timeout_s), 0.0, 0.0
    detector.silent(now_s, ["a", "b"])
    detector.heard("a")
    for gap_s in gaps:
        now_s += gap_s
        detector.heard("b")
        silent = dict(detector.silent(now_s, ["a", "b"]))
        assert silent.get("a", 0.0) <= now_s - heard_s + 1e-9
        assert "b" not in silent


# -- BatchPlanner -----------------------------------------------------------------------------------------------------


def plan_of(workers: int, generation: int = 1) -> GenerationSpec:
    members = tuple(Member(worker=f"w{i + 1}", node="n1") for i in range(workers))
    return GenerationSpec(generation=generation, members=members)


def report_of(workers: int, shape: BatchChoice, generation: int = 1) -> StepReport:
    return StepReport(
        generation=generation,
        nodes=1,
        replicas=workers,
        shape=shape,
        steps=10,
        step_time=0.1 + 0.001 * shape.atomic_bsz,
        grad_time=0.05,
        noise=NoiseScale(sqr=1.0, var=1000.0),
        epoch=0,
        epochs=1,
        total_steps=10,
        batch_size=shape.batch_size(workers),
    )


def open_planner(*, fixed: bool = False) -> BatchPlanner:
    planner = BatchPlanner()
    limits = BatchLimits(init_batch_size=64, max_batch_size=None if fixed else 1024, local_bsz_bounds=(8, 256))
    planner.open(LoaderInfo(limits=limits, dataset_size=10_000))
    return planner


def test_fixed_planner_keeps_the_global_batch_at_any_size() -> None:
    planner = open_planner(fixed=True)
    for workers in (1, 2, 4):
        choice = planner.choose(plan_of(workers))
        assert choice is not None
        assert choice.batch_size(workers) == 64


def test_a_batch_change_is_noticed_past_an_empty_report() -> None:
    planner = open_planner()
    assert planner.observe(report_of(2, BatchChoice(atomic_bsz=32))) is None
    changed = report_of(2, BatchChoice(atomic_bsz=64))
    assert planner.observe(dataclasses.replace(changed, steps=0, batch_size=0)) is None
    assert planner.observe(changed) == 64
    assert planner.observe(changed) is None
    assert planner.observe(report_of(4, BatchChoice(atomic_bsz=64))) is None  # the resize tells of it


def test_planner_without_a_loader_leaves_the_choice_to_it() -> None:
    assert BatchPlanner().choose(plan_of(2)) is None


def test_a_cancelled_change_does_not_stop_the_batch_adapting() -> None:
    """The job trains on with two workers; the planner must not believe that it has four."""
    planner = open_planner()
    shape = planner.choose(plan_of(2))
    assert shape is not None
    assert planner.choose(plan_of(4, generation=2)) is not None
    planner.observe(report_of(2, shape))
    snapshot = planner.due(10.0)
    assert snapshot is not None
    model = fit_snapshot(snapshot)
    assert planner.fitted(model) is None  # the change may still come
    planner.withdraw()
    change = planner.fitted(model)
    assert change is not None, "a batch of 64 on two workers is far from the best at this noise"
    assert change[0].batch_size(2) > 64
    assert planner.fitted(model) is None  # asked for already


def test_a_withdrawal_from_one_leaves_the_batch_alone() -> None:
    """A worker that starts over is not to hear of the generation in effect any more; for the others it stands."""
    planner = open_planner()
    planner.choose(plan_of(2))
    planner.choose(plan_of(4, generation=2))
    planner.observe(report_of(4, BatchChoice(atomic_bsz=16), generation=2))
    snapshot = planner.due(10.0)
    assert snapshot is not None
    change = planner.fitted(fit_snapshot(snapshot))
    assert change is not None
    planner.withdraw()
    choice = planner.choose(plan_of(3, generation=3))
    assert choice is not None
    assert choice.batch_size(3) >= change[0].batch_size(4)
