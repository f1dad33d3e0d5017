"""``elastic-ray stop`` of several jobs, one of which does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import click
import pytest
import ray
from click.testing import CliRunner
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from elastic_ray.cli import cluster
from elastic_ray.cli.app import cli
from elastic_ray.cli.listings import JobAnswers
from elastic_ray.events import JobPhase, JobStatus
from placement.ray_cluster.named_actors import call_within


class Answering(cluster.JobClient):
    """A job that ends when it is told to."""

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        return None

    def wait_for(self, reached: Callable[[JobStatus], bool], timeout_s: float) -> JobStatus | None:
        return JobStatus(job=self.answers.job, phase=JobPhase.STOPPED)


class Silent(Answering):
    """A job whose controller answers nothing."""

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        raise click.ClickException(f"the controller of job {self.answers.job!r} has not answered")


def test_stop_reaches_jobs_beside_silent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_sweep(sweep: str, name: str, *, now: bool, reason: str) -> int:
        if sweep == "silent":
            raise click.ClickException("the actor of sweep 'silent' has not answered")
        return 2

    found = tuple(kind(JobAnswers(actor=f"job:{name}"), None) for kind, name in ((Silent, "a"), (Answering, "b")))
    monkeypatch.setattr(cluster, "connect", lambda: None)
    monkeypatch.setattr(cluster, "find_jobs", lambda name: found)
    monkeypatch.setattr(cluster, "find_sweeps", lambda name, jobs: ["silent", "lr"])
    monkeypatch.setattr(cluster, "stop_sweep", stop_sweep)
    told = CliRunner().invoke(cli, ["stop", "both"])
    silent = "the actor of sweep 'silent' has not answered; the controller of job 'a' has not answered"
    assert told.exit_code == 1 and told.stderr == f"Error: {silent}\n"
    assert told.stdout.startswith("the sweep ends; 2 trials stopped\njob b: stopped")


class Mute:
    """In place of a sweep's actor that answers nothing."""

    stop = SimpleNamespace(remote=lambda reason, now: None)


def test_stop_names_a_silent_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(ref: None, timeout: float) -> None:
        raise GetTimeoutError

    monkeypatch.setattr(ray, "get", wait)
    with pytest.raises(click.ClickException, match="the actor of sweep 'lr' has not answered within 10 s"):
        cluster.stop_sweep(Mute(), "lr", now=False, reason="enough")


def test_restarts_do_not_lengthen_the_wait_for_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor is away for half of the time, and then silent: the wait counts from the first call."""
    waits: list[float] = []

    def wait(ref: None, timeout: float) -> None:
        waits.append(timeout)
        raise GetTimeoutError if len(waits) > 1 else ActorUnavailableError("it restarts", None)

    def call() -> None:
        if not waits:
            time.sleep(0.2)  # the time that it is away

    monkeypatch.setattr(ray, "get", wait)
    with pytest.raises(GetTimeoutError):
        call_within(0.4, call)
    assert len(waits) == 2 and waits[1] < 0.25
