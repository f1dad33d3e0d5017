"""Where a job's time went, and how far it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.events import EventKind, JobEvent
from elastic_ray.record.outlook import TimeSpent, progress_ratio, seconds_to_end, time_spent
from placement.cluster.progress import Progress

TIMES = st.floats(0, 1e6)


def event(kind: EventKind, time_s: float, pause_s: float = 0.0) -> JobEvent:
    return JobEvent(kind=kind, time_s=time_s, from_workers=1, to_workers=1, reason="", pause_s=pause_s)


@given(st.lists(st.builds(event, st.sampled_from(EventKind), TIMES, TIMES), max_size=12), TIMES, TIMES)
def test_the_parts_sum_to_the_whole(events: list[JobEvent], submitted_s: float, lasted_s: float) -> None:
    events = [each for each in events if each.kind is not EventKind.FINISHED]
    now_s = max([submitted_s, *(each.time_s for each in events)]) + lasted_s
    spent = time_spent(events, submitted_s, now_s)
    assert min(spent.waiting_s, spent.pausing_s, spent.training_s) >= 0
    assert spent.total_s == pytest.approx(now_s - submitted_s)
    assert spent.productive_share is None or 0 <= spent.productive_share <= 1


def test_a_job_that_pauses_restarts_and_ends() -> None:
    events = [
        event(EventKind.STARTED, 10),
        event(EventKind.RESIZE, 20, pause_s=2),
        event(EventKind.RESTART, 30),
        event(EventKind.STARTED, 35),
        event(EventKind.FINISHED, 45),
    ]
    assert time_spent(events, 0, 1000) == TimeSpent(waiting_s=15, pausing_s=2, training_s=28)


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
