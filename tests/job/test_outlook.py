"""Where a job's time went, and how far it is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.events import EventKind, JobEvent, JobPhase, Pause
from elastic_ray.membership.roster import WorkerPhase
from elastic_ray.record.outlook import (
    TimeSpent,
    eta_range,
    last_pause,
    progress_ratio,
    reports_to_end,
    samples_to_end,
    seconds_of_reports,
    seconds_to_end,
    steps_to_reach,
    time_spent,
    waits_for,
    with_length,
)
from placement.cluster.cluster import GPU_TYPE_LABEL
from placement.cluster.jobs import Progress
from tests.job.specs import spec

TIMES = st.floats(0, 1e6)
NUMBERS = ("start_s", "steps", "reached_steps")


ANY = st.floats()


def event(kind: EventKind, time_s: float, pause_s: float = 0.0, **detail: Any) -> JobEvent:
    facts = {"from_workers": 1, "to_workers": 1, "reason": "", "pause_s": pause_s, "detail": detail}
    return JobEvent(kind=kind, time_s=time_s, **facts)


@st.composite
def histories(draw: st.DrawFn) -> JobEvent:
    kind = draw(st.sampled_from(EventKind))
    return event(kind, draw(TIMES), draw(ANY), **draw(st.dictionaries(st.sampled_from(NUMBERS), ANY | st.none())))


@given(st.lists(histories(), max_size=12), TIMES, TIMES)
def test_the_parts_sum_to_the_whole(events: list[JobEvent], submitted_s: float, lasted_s: float) -> None:
    events = [each for each in events if each.kind is not EventKind.FINISHED]
    now_s = max([submitted_s, *(each.time_s for each in events)]) + lasted_s
    spent = time_spent(events, submitted_s, now_s)
    assert min(dataclasses.astuple(spent)) >= 0
    assert spent.total_s == pytest.approx(now_s - submitted_s)
    assert spent.productive_share is None or 0 <= spent.productive_share <= 1


def test_the_productive_share_is_training_time_by_all_time() -> None:
    spent = TimeSpent(waiting_s=1.0, starting_s=2.0, pausing_s=3.0, catching_up_s=4.0, training_s=30.0)
    assert spent.productive_share == 0.75
    assert TimeSpent(training_s=0.2).productive_share == 1.0
    assert TimeSpent().productive_share is None and TimeSpent(waiting_s=3.0).productive_share == 0.0


def test_a_job_that_pauses_restarts_and_ends() -> None:
    events = [
        event(EventKind.STARTED, 10),
        event(EventKind.RESIZE, 20, pause_s=2),
        event(EventKind.RESTART, 30),
        event(EventKind.STARTED, 35),
        event(EventKind.FINISHED, 45),
    ]
    assert time_spent(events, 0, 1000) == TimeSpent(waiting_s=15, pausing_s=2, training_s=28)


def test_restart_is_caught_up_once_as_far_as_before() -> None:
    events = [
        event(EventKind.STARTED, 10, start_s=4),
        event(EventKind.RESTART, 30, steps=100, reached_steps=140),
        event(EventKind.STARTED, 35, start_s=3),
        event(EventKind.RESIZE, 40, pause_s=1),
        event(EventKind.RESTART, 45, steps=100, reached_steps=120),  # before it was as far as before the first
        event(EventKind.STARTED, 50, start_s=1),
    ]
    assert steps_to_reach(events) == 140
    before = TimeSpent(waiting_s=12, starting_s=8, pausing_s=1, catching_up_s=19, training_s=20)
    assert time_spent(events, 0, 60) == before
    caught_up = event(EventKind.CAUGHT_UP, 55)
    assert steps_to_reach([*events, caught_up]) == 0
    after = dataclasses.replace(before, catching_up_s=14, training_s=25)
    assert time_spent([*events, caught_up], 0, 60) == after


def test_a_restart_that_loses_nothing_has_no_catching_up() -> None:
    events = [
        event(EventKind.STARTED, 10),
        event(EventKind.RESTART, 20, steps=140, reached_steps=139),  # the last report was older than the state
        event(EventKind.STARTED, 30),
    ]
    assert steps_to_reach(events) == 0
    assert time_spent(events, 0, 40) == TimeSpent(waiting_s=20, training_s=20)


def test_processes_that_start_now_are_told_apart_from_waiting() -> None:
    assert time_spent([], 0, 10) == TimeSpent(waiting_s=10)
    assert time_spent([], 0, 10, 4.0) == TimeSpent(waiting_s=6, starting_s=4)
    assert time_spent([], 0, 10, 99.0) == TimeSpent(starting_s=10)
    assert time_spent([event(EventKind.FINISHED, 8, start_s=3)], 0, 10) == TimeSpent(waiting_s=5, starting_s=3)


def test_a_clock_that_goes_back_takes_no_time() -> None:
    events = [event(EventKind.STARTED, 10), event(EventKind.PREEMPTED, 5), event(EventKind.STARTED, 12)]
    assert time_spent(events, 0, 3) == TimeSpent(waiting_s=12)


def test_last_pause_is_a_changes_with_its_first_step() -> None:
    parts = {"vote_s": 0.25, "group_s": 0.5, "state_s": 0.25}
    resize = dataclasses.replace(event(EventKind.RESIZE, 10, 1.0, **parts), generation=3)
    events = [resize, event(EventKind.CHECKPOINT, 11)]
    assert last_pause([], 3, 0.1) is None
    assert last_pause(events, 3, 0.1) == Pause(**parts, first_step_s=0.1)
    assert last_pause(events, 2, 0.1) == Pause(**parts), "that step was of another group"


def test_progress_and_what_is_left() -> None:
    progress = Progress(done=30, epoch_ends=(10, 20, 30), epochs=4)
    assert progress_ratio(progress) == 0.75
    assert seconds_to_end(progress, init_batch_size=64, goodput=32.0) == 20


@pytest.mark.parametrize(
    "progress, batch, goodput",
    [
        (None, 64, 1.0),
        (Progress(done=1), 64, 1.0),
        (Progress(done=1, epochs=2), None, 1.0),
        *[(Progress(done=1, epochs=2), 64, rate) for rate in (None, 0.0, float("nan"))],
    ],
)
def test_the_end_is_unknown(progress: Progress | None, batch: int | None, goodput: float | None) -> None:
    assert seconds_to_end(progress, batch, goodput) is None


@given(st.floats(0, 1e9), st.lists(st.floats(), max_size=8), st.none() | st.floats())
def test_the_end_lies_between_its_bounds(eta_s: float, rates: list[float], efficiency: float | None) -> None:
    low_s, high_s = eta_range(eta_s, rates, efficiency)
    assert low_s is not None and high_s is not None
    assert 0 <= low_s <= eta_s <= high_s <= 4 * eta_s * (1 + 1e-9)


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0.01, 0.2))
def test_the_bounds_widen_with_the_scatter(eta_s: float, rate: float, scatter: float) -> None:
    steady, scattered = [rate] * 6, [rate * (1 + scatter), rate * (1 - scatter)] * 3
    assert eta_range(eta_s, steady, 1.0) == (pytest.approx(eta_s), pytest.approx(eta_s))
    low_s, high_s = eta_range(eta_s, scattered, 1.0)
    assert (low_s, high_s) == (pytest.approx(eta_s / (1 + 2 * scatter)), pytest.approx(eta_s / (1 - 2 * scatter)))
    assert eta_range(eta_s, steady, 0.5)[0] == pytest.approx(0.5 * eta_s), "a noise scale that grows"
    assert eta_range(eta_s, steady, None) == eta_range(eta_s, steady, 1.0), "an unknown one counts in full"
    assert eta_range(eta_s, steady, 0.01)[0] == pytest.approx(0.1 * eta_s), "not less than a tenth"


@pytest.mark.parametrize("eta_s", [None, math.nan, math.inf, -1.0])
def test_an_end_that_is_unknown_has_no_bounds(eta_s: float | None) -> None:
    assert eta_range(eta_s, [1.0], 1.0) == (None, None)


def test_a_first_epoch_is_as_long_as_the_dataset() -> None:
    begun = Progress(done=5, epochs=4)
    known = with_length(begun, dataset_size=640, init_batch_size=64)
    assert progress_ratio(known) == 5 / 40 and progress_ratio(begun) == 1 / 4
    assert with_length(None, 640, 64) is None and with_length(begun, None, 64) == begun
    later = Progress(done=25, epoch_ends=(20,), epochs=4)
    assert with_length(later, 640, 64) == later, "measured"


def test_samples_to_the_end_are_epochs_of_the_dataset() -> None:
    half = Progress(done=30, epoch_ends=(10, 20), epochs=4)
    assert samples_to_end(half, 640, 64, None) == 640
    assert samples_to_end(half, None, 64, 0.5) == 10 * 64 / 0.5
    assert samples_to_end(dataclasses.replace(half, stride=2), 640, 64, None) == 2 * 640
    for efficiency in (None, 0.0, math.nan):
        assert samples_to_end(half, None, 64, efficiency) is None
    assert samples_to_end(None, 640, 64, 1.0) is None and samples_to_end(Progress(done=1), 640, 64, 1.0) is None


def test_a_trial_ends_with_its_last_report() -> None:
    assert reports_to_end(25, 100) == 0.25 and reports_to_end(200, 100) == 1.0 and reports_to_end(5, None) is None
    assert seconds_of_reports(50.0, made=25, left=75) == 150.0 and seconds_of_reports(0.0, made=0, left=9) is None


WAITING = {"workers": (), "target_workers": 0, "storage": "", "needs_node": False}


@pytest.mark.parametrize(
    ("phase", "facts", "words"),
    [
        (JobPhase.WAITING, {}, "2 slots (CPU 1, GPU 0.5)"),
        (JobPhase.WAITING, {"needs_node": True}, "a node of the autoscaler with 2 slots (CPU 1, GPU 0.5)"),
        (JobPhase.WAITING, {"storage": "the state"}, "storage"),
        (JobPhase.RUNNING, {"storage": "the state"}, "storage"),
        (JobPhase.RUNNING, {}, ""),
        (JobPhase.PAUSED, {}, ""),
        (JobPhase.FAILED, {"storage": "the state"}, ""),
        (JobPhase.WAITING, {"target_workers": 3}, "start of processes"),
        (
            JobPhase.WAITING,
            {"target_workers": 3, "workers": (WorkerPhase.RESERVING, WorkerPhase.STARTING)},
            "placement group of 1 of 3 workers",
        ),
        (
            JobPhase.WAITING,
            {"target_workers": 1, "workers": (WorkerPhase.RESERVING, WorkerPhase.RESERVING)},
            "placement group of 2 of 2 workers",
        ),
        (JobPhase.WAITING, {"target_workers": 1, "workers": (WorkerPhase.READY,)}, "start of processes"),
    ],
)
def test_a_job_says_what_it_waits_for(phase: JobPhase, facts: dict[str, Any], words: str) -> None:
    job = spec(min_workers=2, bundle={"GPU": 0.5, "CPU": 1.0})
    assert waits_for(job, phase, **{**WAITING, **facts}) == words


def test_a_slot_of_a_type_is_named() -> None:
    job = spec(min_workers=1, label_selector={GPU_TYPE_LABEL: "T4"})
    assert waits_for(job, JobPhase.WAITING, **WAITING) == "1 slot (CPU 1) on T4"


def test_bounds_of_few_and_of_wild_rates() -> None:
    assert eta_range(60.0, [1.0, 1.0], 1.0) == (pytest.approx(40.0), pytest.approx(120.0)), "two tell no scatter"
    assert eta_range(60.0, [1.0, 1.0, 0.0, -1.0], 1.0) == eta_range(60.0, [], 1.0)
    assert eta_range(70.0, [1.0, 1.0, 100.0], 2.0) == (pytest.approx(40.0), pytest.approx(280.0))
    assert eta_range(0.0, [1.0] * 3, 1.0) == (0.0, 0.0)


def test_an_empty_pass_or_run_tells_no_end() -> None:
    begun = Progress(done=5, epochs=4)
    assert with_length(begun, 0, 64) == begun == with_length(begun, 640, 0) and with_length(begun, 1, 64) != begun
    assert progress_ratio(Progress(done=0.0, epochs=4)) == 0.0
    assert reports_to_end(-3, 10) == 0.0 and reports_to_end(5, 0) is None
    assert seconds_of_reports(50.0, made=25, left=-1) == 0.0 and seconds_of_reports(4.0, made=1, left=2) == 8.0


def test_pauses_lie_within_what_they_interrupt() -> None:
    events = [event(EventKind.STARTED, 10, pause_s=5), event(EventKind.RESIZE, 12, pause_s=99)]
    assert time_spent(events, 0, 20) == TimeSpent(waiting_s=10, pausing_s=10)
    assert time_spent([events[0]], 0, 20) == TimeSpent(waiting_s=10, training_s=10), "before it nothing trained"
    again = [event(EventKind.STARTED, 10), event(EventKind.STARTED, 15, pause_s=3), event(EventKind.PAUSED, 18)]
    assert time_spent(again, 0, 20) == TimeSpent(waiting_s=12, training_s=8)
    told = [event(EventKind.STARTED, 10), event(EventKind.RESIZE, 12, pause_s=-4.0)]
    assert time_spent(told, 0, 20) == TimeSpent(waiting_s=10, training_s=10)


def test_pauses_of_nothing_are_not_the_last() -> None:
    real = dataclasses.replace(event(EventKind.FAILURE, 10, 1.0, vote_s=0.5), generation=3)
    for later in (event(EventKind.RESIZE, 11), event(EventKind.CHECKPOINT, 11, 2.0), event(EventKind.STARTED, 11, 2.0)):
        assert last_pause([real, later], 3, None) == Pause(vote_s=0.5)
