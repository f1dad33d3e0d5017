"""What a job's past says of its costs."""

from __future__ import annotations

import pytest

from elastic_ray.checkpoints.interval import FIRST_INTERVAL_S
from elastic_ray.events import EventKind, Pause
from elastic_ray.membership.instructions import Note
from elastic_ray.record.losses import SizeHistory


def note(kind: EventKind, workers: int, pause_s: float = 0.0) -> Note:
    return Note(kind=kind, from_workers=1, to_workers=workers, reason="", pause=Pause(state_s=pause_s))


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
