"""Jobs that tell how far they are and what they measured, and a later job that starts with it: trained for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train

import elastic_ray as er
from elastic_ray.driver.handle import JobHandle
from elastic_ray.events import EventKind
from placement.allocator.actor import PolicyConflictError, get_or_create_allocator
from placement.cluster.cluster import DOMAIN_LABEL, GPU_TYPE_LABEL
from placement.cluster.jobs import JobView
from tests.job import racing, traced
from tests.job.jobs import start, wait_until

pytestmark = [
    pytest.mark.ray_cluster(num_cpus=3, labels={GPU_TYPE_LABEL: "T4", DOMAIN_LABEL: "rack-1"}, _system_config={}),
    pytest.mark.timeout(1000),
]

ADAPT = {"max_batch_size": 96, "local_bsz_bounds": (6, 96)}
NET = {
    "model_fingerprint": "little-net",
    "samples": 960,
    "batch_size": 24,
    "adapt": ADAPT,
    "workers": (1, 3),
    "elastic": {"warm_workers_per_node": 0},
}


def seen(job: str) -> JobView | None:
    """The job as the allocator sees it."""
    state = ray.get(get_or_create_allocator().snapshot.remote(), timeout=180).jobs.get(job)  # type: ignore[attr-defined]
    return None if state is None else state.view


def watch(handle: JobHandle, views: list[JobView]) -> bool:
    """Look once; whether the job has measured something."""
    view = seen(handle.job)
    if view is not None:
        views.append(view)
    return view is not None and bool(view.observations)


@pytest.mark.slow
def test_the_next_job_starts_with_what_one_has_measured(ray_cluster: Any, tmp_path: Path) -> None:
    first = start(tmp_path, name="first", epochs=20, **NET)
    views: list[JobView] = []
    first.resize(3)
    wait_until(lambda: watch(first, views), first)
    assert "held at 3" in str(first.explain())
    first.resize(2)
    wait_until(lambda: watch(first, views) and first.status().workers == 2, first)
    first.release()
    while not first.wait(0.2):
        watch(first, views)
    first.result(timeout=180)
    assert first.status().epoch == 20 and first.explain() is None
    told = [view.progress for view in views if view.progress is not None]
    assert told == sorted(told, key=lambda progress: (progress.done, progress.epoch_ends))
    assert {progress.epochs for progress in told} == {20.0}
    assert len(told[0].epoch_ends) < len(told[-1].epoch_ends) <= 20
    assert told[-1].done >= len(told[-1].epoch_ends) * 960 / 96, "the least that so many samples can be worth"
    assert {view.fingerprint for view in views} == {"little-net on 1 CPU"}
    assert {gpu for view in views for gpu in view.observations} == {"T4"} == set(views[-1].models)

    (file,) = (tmp_path / "runs" / ".elastic_ray" / "knowledge").glob("*.parquet")
    assert file.stat().st_size > 0
    ray.kill(get_or_create_allocator(), no_restart=True)
    second = start(tmp_path, name="second", epochs=2, **NET)
    second.result(timeout=180)
    started = next(event for event in second.events() if event.kind is EventKind.STARTED)
    assert "no model yet" not in started.reason, "its very first size is by what the other one measured"
    steps = [line for line in traced.read(tmp_path / "trace") if line["kind"] == "step" and line["step"] == 0]
    latest = max(line["time"] for line in steps) - 5.0
    assert sum(len(line["indices"]) for line in steps if line["time"] > latest) > 24, "and its very first batch"


def race(folder: Path, name: str, epochs: int) -> tuple[list[str], str]:
    """The strategies of rank 0's steps, and why the last was chosen."""
    handle = er.ElasticTrainer(
        racing.train,
        train_loop_config={"epochs": epochs},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name=name, storage_path=str(folder / "runs")),
    ).submit()
    used, domains = handle.result(timeout=180).return_value
    assert domains == ("rack-1", "rack-1")
    (chosen,) = [event for event in handle.events() if event.kind is EventKind.STRATEGY]
    return used, chosen.reason


@pytest.mark.slow
def test_the_next_job_starts_with_what_won(ray_cluster: Any, tmp_path: Path) -> None:
    used, why = race(tmp_path, "first", 20)
    assert len(set(used)) > 2 and len(set(used[-100:])) == 1 and "the fastest of" in why
    for name in ("second", "third"):
        again, why = race(tmp_path, name, 20)
        assert set(again) <= {"auto", used[-1]} and again[-1] == used[-1], "nothing else is tried"
        assert "earlier jobs" in why
        ray.kill(get_or_create_allocator(), no_restart=True)  # the third one's has to read it


@pytest.mark.thorough
def test_another_policy_is_refused_while_a_job_runs(ray_cluster: Any, tmp_path: Path) -> None:
    get_or_create_allocator("fifo")
    handle = start(tmp_path, workers=(1, 3), name="ruled", epochs=10_000)
    wait_until(lambda: seen("ruled") is not None, handle)
    assert "fifo" in str(handle.explain())
    with pytest.raises(PolicyConflictError, match=r"'goodput' cannot rule .* runs policy 'fifo' for ruled"):
        get_or_create_allocator("goodput")
    handle.stop()
    handle.result(timeout=180)
