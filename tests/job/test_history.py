"""What a job's past says of its costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elastic_ray.checkpoints.interval import FIRST_INTERVAL_S
from elastic_ray.events import EventKind, Pause
from elastic_ray.membership.instructions import Note
from elastic_ray.record.controller_state import ControllerState
from elastic_ray.record.losses import SizeHistory


def note(kind: EventKind, workers: int, pause_s: float = 0.0) -> Note:
    return Note(kind=kind, from_workers=1, to_workers=workers, reason="", pause=Pause(state_s=pause_s))


def remembered(**facts: Any) -> ControllerState:
    """What the controller before has noted down of sizes; nothing matters of the rest."""
    values = {field.name: None for field in dataclasses.fields(ControllerState)}
    sizes = {"most_workers": 0, "resizes": 0, "resize_cost_s": 0.2, "start_s": 0.0}
    return ControllerState(**{**values, **sizes, **facts})


def test_start_lasts_from_the_first_process_to_the_group() -> None:
    history = SizeHistory(0.0)
    history.launched(1.0, 101.0)
    history.launched(2.0, 102.0)  # the second process of the same group
    history.settled(note(EventKind.STARTED, 2), 5.0)
    assert (history.start_s, history.settled_s, history.most_workers) == (4.0, 5.0, 2)
    history.settled(note(EventKind.RESIZE, 1), 9.0)
    assert (history.start_s, history.settled_s, history.most_workers) == (4.0, 9.0, 2)


def test_the_latest_resize_counts_most() -> None:
    history = SizeHistory(0.0)
    before = history.resize_cost_s
    history.settled(note(EventKind.STARTED, 1, pause_s=9.0), 1.0)
    assert (history.resizes, history.resize_cost_s) == (0, before)
    for _ in range(20):
        history.settled(note(EventKind.RESIZE, 2, pause_s=1.2), 2.0)
    assert history.resizes == 20
    assert history.resize_cost_s == pytest.approx(1.2, rel=0.01)


def test_ten_groups_without_step_may_fail_and_no_more() -> None:
    history = SizeHistory(0.0)
    assert not any(history.is_stuck(7) for _ in range(10))
    assert history.is_stuck(7)
    assert not history.is_stuck(8)


def test_checkpoint_is_expected_soon_after_the_first_start_only() -> None:
    history = SizeHistory(0.0)
    history.launched(0.0, 0.0)
    history.settled(note(EventKind.STARTED, 1), 10.0)
    history.launched(500.0, 500.0)
    history.settled(note(EventKind.STARTED, 1), 510.0)
    last_s = 10.0 + 2.0 * FIRST_INTERVAL_S
    assert history.saves_soon(last_s - 0.1)
    assert not history.saves_soon(last_s + 0.1)


def test_time_of_a_start_is_told_while_it_lasts() -> None:
    history = SizeHistory(0.0)
    assert history.starting_s(9.0) == 0.0 and history.start_detail(9.0) == {}
    history.launched(10.0, 110.0)
    assert history.starting_s(12.5) == 2.5 and history.start_detail(12.5) == {"start_s": 2.5}
    assert history.starting_s(9.0) == 0.0, "a clock that is behind"
    history.start_ended()
    assert history.start_detail(20.0) == {} and history.start_s == 0.0 and history.launched_at_s is None
    history.settled(note(EventKind.STARTED, 1), 30.0)
    assert history.start_s == 0.0 and not history.saves_soon(60.0), "what started was no group"


def test_a_pause_counts_three_tenths_of_the_latest() -> None:
    history = SizeHistory(0.0)
    history.settled(note(EventKind.RESIZE, 2, pause_s=1.2), 2.0)
    assert history.resize_cost_s == pytest.approx(0.7 * 0.2 + 0.3 * 1.2)
    history.settled(note(EventKind.FAILURE, 2, pause_s=9.0), 3.0)
    assert history.resizes == 1 and history.resize_cost_s == pytest.approx(0.5)


def test_history_continues_in_another_controller() -> None:
    before = remembered(most_workers=3, resizes=2, resize_cost_s=0.5, start_s=7.0, launched_at_s=100.0)
    history = SizeHistory(50.0)
    history.recall(before, at_s=104.0)
    assert (history.most_workers, history.resizes, history.resize_cost_s, history.start_s) == (3, 2, 0.5, 7.0)
    assert history.starting_s(51.0) == 5.0 and history.launched_at_s == 100.0
    assert history.saves_soon(50.0 + 2 * FIRST_INTERVAL_S - 1) and not history.saves_soon(50.0 + 2 * FIRST_INTERVAL_S)
    new = SizeHistory(500.0)
    new.recall(remembered(), at_s=104.0)
    assert new.starting_s(999.0) == 0.0 and not new.saves_soon(500.0)
    ahead = SizeHistory(50.0)
    ahead.recall(dataclasses.replace(before, launched_at_s=200.0), at_s=104.0)
    assert ahead.starting_s(51.0) == 1.0, "a clock that went back"


def test_a_stuck_job_counts_anew_with_each_step() -> None:
    history = SizeHistory(0.0)
    for steps in (0, 1, 1, 2):
        assert not any(history.is_stuck(steps) for _ in range(5))
    assert not any(history.is_stuck(2) for _ in range(5)) and history.is_stuck(2)
