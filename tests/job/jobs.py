"""Starting traced jobs, for the tests beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind
from elastic_ray.faults import Faults
from tests.job import traced


def start(
    folder: Path,
    *,
    workers: int | tuple[int, int],
    faults: Faults | None = None,
    max_failures: int = 0,
    name: str | None = None,
    bundle: dict[str, float] | None = None,
    elastic: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
    scheduling: er.SchedulingConfig | None = None,
    model_fingerprint: str | None = None,
    **config: Any,
) -> er.JobHandle:
    """Submit a traced job; its trace lies in ``folder / "trace"``."""
    trace = folder / "trace"
    trace.mkdir(exist_ok=True)
    return er.ElasticTrainer(
        traced.train,
        train_loop_config={"trace": str(trace), **config},
        scaling_config=ray.train.ScalingConfig(  # type: ignore[call-arg]
            num_workers=workers,
            use_gpu="GPU" in (bundle or {}),
            resources_per_worker=bundle or {"CPU": 1},
            label_selector=labels,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(folder / "runs"),
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
        ),
        elastic_config=er.ElasticConfig(faults=faults, **{"restart": False, **(elastic or {})}),
        scheduling_config=scheduling,
        model_fingerprint=model_fingerprint,
    ).submit()


def run(folder: Path, *, timeout_s: float = 120, **options: Any) -> tuple[er.JobHandle, traced.Account]:
    """Run a traced job to its end and check its trace."""
    handle = start(folder, **options)
    handle.result(timeout=timeout_s)
    return handle, traced.account(folder / "trace", samples=int(options.get("samples", 192)))


def kinds(handle: er.JobHandle) -> list[EventKind]:
    """Kinds of the job's events, in order."""
    return [event.kind for event in handle.events()]


def wait_until(condition: Callable[[], bool], handle: er.JobHandle, timeout_s: float = 180) -> None:
    """Wait for something to come true while the job runs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {handle.status()} {handle.events()}"
        assert not handle.done(), f"the job has ended: {handle.status()} {handle.events()}"
        time.sleep(0.05)
