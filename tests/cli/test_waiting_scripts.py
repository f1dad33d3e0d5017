"""What is said of a submitted script that does not start, or whose dashboard is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import click
import pytest

from elastic_ray.cli import submission

PIP = "setup failed: no environment\nTraceback (most recent call last):\n  File ...\nE: x\nERROR: no such package\n"


class Dashboard:
    """A dashboard that says of a script what it is told."""

    def __init__(self, *states: str, message: str = "") -> None:
        self.states, self.message = list(states), message

    def get_job_info(self, submission_id: str) -> Any:
        """The next state; the last one again and again; an error without any."""
        if not self.states:
            raise RuntimeError("no dashboard")
        status = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return SimpleNamespace(
            submission_id=submission_id,
            job_id=None,
            metadata={},
            status=status,
            message=self.message,
            entrypoint="",
            start_time=0,
            end_time=0,
        )

    async def tail_job_logs(self, submission_id: str) -> AsyncIterator[str]:
        """What the script prints."""
        yield f"{submission_id} prints"


def test_a_script_that_waits_says_for_what(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    there = Dashboard("PENDING", "PENDING", "PENDING", "RUNNING", message="It may be waiting for pip.")
    monkeypatch.setattr(submission, "client", lambda: there)
    for name in ("_SILENT_S", "_POLL_S"):
        monkeypatch.setattr(submission, name, 0.001)
    seen: list[str] = []
    submission.follow("digits", seen.append)
    assert seen == ["digits prints"]
    assert capsys.readouterr().err.splitlines() == ["submission digits, 0s: It may be waiting for pip."]


def test_a_failed_environment_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "client", lambda: Dashboard("FAILED", message=PIP))
    assert submission.wait("digits").message == "setup failed: no environment ERROR: no such package"


def test_a_dashboard_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "client", Dashboard)
    for call in (lambda: submission.wait("digits"), lambda: submission.follow("digits", print)):
        with pytest.raises(click.ClickException, match="the connection to the dashboard was lost: no dashboard"):
            call()
