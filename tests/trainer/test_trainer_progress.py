"""What a job shows while it runs."""

from __future__ import annotations

import io

import numpy as np
import pytest

from elastic_ray.driver.display import JobDisplay, event_line, status_line
from elastic_ray.events import EventKind, JobEvent, JobPhase, JobStatus, Report


def status(**fields: object) -> JobStatus:
    values = {"job": "a1", "phase": JobPhase.RUNNING, "workers": 4, "target_workers": 4, "epoch": 2, **fields}
    return JobStatus(**values)


def event(kind: EventKind = EventKind.RESIZE, before: int = 2, after: int = 4, **fields: object) -> JobEvent:
    values = {"reason": "goodput: +1 gains 0.31.", **fields}
    return JobEvent(kind=kind, time_s=0.0, from_workers=before, to_workers=after, **values)


@pytest.mark.parametrize(
    "given, line",
    [
        (event(pause_s=0.18), "job a1: 2 -> 4 workers, goodput: +1 gains 0.31, pause 0.18 s"),
        (
            event(EventKind.FAILURE, 4, 3, reason="rank 1 died"),
            "job a1: failure, 4 -> 3 workers, rank 1 died",
        ),
        (event(EventKind.OUT_OF_MEMORY, 4, 4, reason="lowered"), "job a1: out of memory, lowered"),
        (event(EventKind.STARTED, 0, 2, reason=""), "job a1: 0 -> 2 workers"),
    ],
)
def test_events_as_lines(given: JobEvent, line: str) -> None:
    assert event_line("a1", given) == line


@pytest.mark.parametrize(
    "given, line",
    [
        (
            status(
                batch_size=512,
                throughput=8312.0,
                goodput=7000.0,
                epochs=30,
                step=9,
                metrics={"loss": 1},
            ),
            "job a1: running, workers 4, batch 512, samples/s 8.31k, goodput 7k, epoch 2/30, step 9, loss 1",
        ),
        (status(target_workers=2), "job a1: running, workers 4 -> 2, epoch 2, step 0"),
        (
            status(phase=JobPhase.WAITING, workers=0, target_workers=1, message="waits for 1 GPU."),
            "job a1: waiting, workers 0 -> 1, waits for 1 GPU",
        ),
        (
            status(phase=JobPhase.FINISHED, workers=0, message="done", metrics={"name": "x", "accuracy": 0.93751}),
            "job a1: finished, epoch 2, step 0, accuracy 0.9375, done",
        ),
        (
            status(job="elastic-2026-11-22_09-12-25-4731", note=f"{'3f' * 28} went"),
            "job elastic-202..-12-25-4731: running, workers 4, epoch 2, step 0, 3f3f3f3f went",
        ),
        (
            status(metrics={"loss": "n/a"}, throughput=0.5),
            "job a1: running, workers 4, samples/s 0.5, epoch 2, step 0",
        ),
        (
            status(cost_usd=1.2345, note="budget of 2 USD cannot be met."),
            "job a1: running, workers 4, epoch 2, step 0, USD 1.23, budget of 2 USD cannot be met",
        ),
    ],
)
def test_statuses_as_lines(given: JobStatus, line: str) -> None:
    assert status_line(given) == line


def test_end_of_epoch_is_line_with_what_was_reported() -> None:
    stream = io.StringIO()
    metrics = {"accuracy": np.float32(0.5), "kind": "test", "loss": 0.25, "bad": float("nan"), "best": True}
    with JobDisplay(stream) as progress:
        for index, done in enumerate((0, 1, 1, 2, 4)):
            progress.report("a1", Report(index=index + 1, metrics=metrics, epochs_done=done), 4)
        progress.event("a1", event(EventKind.FINISHED, 4, 0))  # the last status says it
    told = "done, loss 0.25, accuracy 0.5, bad nan"
    assert stream.getvalue() == f"job a1: epoch 1/4 {told}\njob a1: epoch 2/4 {told}\njob a1: epoch 4/4 {told}\n"


def test_of_many_epochs_hundredth_is_shown_and_the_last() -> None:
    stream = io.StringIO()
    with JobDisplay(stream) as progress:
        for done in range(1, 1006):
            progress.report("a1", Report(index=done, metrics={}, epochs_done=done), 1005)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["job a1: epoch 11/1005 done", "job a1: epoch 22/1005 done"]
    assert lines[-1] == "job a1: epoch 1005/1005 done" and len(lines) == 92


def test_nothing_that_others_have_said_steers_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    bad = "\x1b[2J\r\n[red]\u202e\u200b"
    for stream in (io.StringIO(), Terminal()):
        with JobDisplay(stream) as progress:
            progress.status(status(job=bad, message=bad, metrics={bad: 1.0}))
            progress.event(bad, event(reason=bad))
            progress.report(bad, Report(index=1, metrics={bad: 2.0}, epochs_done=1), None)
        text = stream.getvalue()
        assert "\x1b[2J" not in text and not set("\u202e\u200b") & set(text), repr(text)
        assert stream.isatty() or (text.count("\n") == 3 and "\r" not in text), repr(text)
        assert "\\x1b[2J [red]\\u202e\\u200b" in text, repr(text)


def test_plain_lines_come_at_intervals_and_events_at_once() -> None:
    now = [0.0]
    stream = io.StringIO()
    with JobDisplay(stream, interval_s=5.0, clock=lambda: now[0]) as progress:
        for second in range(12):
            now[0] = float(second)
            progress.status(status(step=second))
            if second == 3:
                progress.event("a1", event())
        progress.status(status(step=11, phase=JobPhase.FINISHED))
        progress.status(status(step=11, phase=JobPhase.FINISHED))
    steps = [line.split("step ")[1] if "step" in line else "event" for line in stream.getvalue().splitlines()]
    assert steps == ["0", "event", "5", "10", "11"]


def test_a_closed_stream_ends_the_display_only() -> None:
    stream = io.StringIO()
    progress = JobDisplay(stream)
    stream.close()
    progress.status(status())
    progress.event("a1", event())
    progress.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_table_with_events_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with JobDisplay(stream) as progress:
        progress.status(status(message="[held] at 4"))
        progress.event("a1", event(reason="[bold] reason"))
        progress.status(status(step=2))
    assert "[held] at 4" in stream.getvalue()
    assert "2 -> 4 workers, [bold] reason" in stream.getvalue()
