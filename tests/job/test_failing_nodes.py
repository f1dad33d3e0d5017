"""A node on which every start fails: the job begins elsewhere, and ends only where other nodes fail as well."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest
import ray
import ray.train

import elastic_ray as er
from elastic_ray.cli import cluster as cli
from elastic_ray.events import EventKind
from placement.allocator.actor import find_allocator
from tests.job import traced
from tests.job.jobs import wait_until
from tests.local_cluster import LocalCluster

# The head has none of the workers' resource.
pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(600), pytest.mark.thorough]


def train(config: dict[str, Any]) -> str:
    """Train, but not on the node that is asked first; with ``everywhere`` on none."""
    node, bad = ray.get_runtime_context().get_node_id(), Path(config["trace"]) / "bad"
    own = bad.with_name(f"{os.getpid()}")
    own.write_text(node)
    if not bad.exists():
        bad.hardlink_to(own)
    if config["everywhere"] or bad.read_text() == node:
        raise ModuleNotFoundError("No module named 'apex'")
    return traced.train(config)


def submit(folder: Path, *, everywhere: bool = False) -> er.JobHandle:
    (folder / "trace").mkdir()
    config = {"trace": str(folder / "trace"), "everywhere": everywhere, "pause_s": 0.1, "epochs": 8}
    return er.ElasticTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"slot": 1}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
    ).submit()


def failures() -> list[Any]:
    """What the allocator knows of failing nodes."""
    return list(ray.get(find_allocator().snapshot.remote()).node_failures)


def test_a_job_begins_elsewhere_than_where_starts_fail(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    for _ in range(2):
        ray_cluster.add_node(num_cpus=1, resources={"slot": 2})
    handle = submit(tmp_path)
    wait_until(lambda: handle.status().workers > 0 and "is avoided, " in handle.status().note, handle)
    handle.result(timeout=180)
    bad = (tmp_path / "trace" / "bad").read_text()
    lost = [event for event in handle.events() if event.kind is EventKind.WARNING]
    assert {event.detail["node"] for event in lost} == {bad} and "No module named 'apex'" in lost[0].reason
    traced.account(tmp_path / "trace")
    (row,) = failures()
    assert (row.node, row.avoided_by, row.by_all) == (bad, (handle.job,), False)
    started = next(event for event in handle.events() if event.kind is EventKind.STARTED)
    assert f"avoids node {bad[:8]}: " in started.reason
    with pytest.raises(click.ClickException, match="'' means 0"):
        cli.forgive("")
    assert cli.forgive(bad[:16]) == bad and not failures()
    with pytest.raises(click.ClickException, match="no worker has failed on node"):
        cli.forgive(bad)


def test_a_program_that_cannot_start_blames_no_node(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    for _ in range(3):
        ray_cluster.add_node(num_cpus=1, resources={"slot": 2})
    with pytest.raises(ModuleNotFoundError, match="apex"):
        submit(tmp_path, everywhere=True).result(timeout=180)
    assert not failures()


def raise_at_once(config: dict[str, Any]) -> None:
    raise NameError("name 'optimiser' is not defined")


def hold(config: dict[str, Any]) -> None:
    """Train for as long as the test lasts."""
    traced.train(config)


def test_mistake_ends_a_job_in_seconds_without_free_slots(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    """The other node is full, so that the job's second start is on the node of the first."""
    for _ in range(2):
        ray_cluster.add_node(num_cpus=1, resources={"slot": 1})
    (tmp_path / "trace").mkdir()
    config = {"trace": str(tmp_path / "trace"), "pause_s": 0.1, "epochs": 100_000}
    one = ray.train.ScalingConfig(num_workers=1, resources_per_worker={"slot": 1})
    run = ray.train.RunConfig(storage_path=str(tmp_path / "runs"))
    full = er.ElasticTrainer(hold, train_loop_config=config, scaling_config=one, run_config=run).submit()
    wait_until(lambda: full.status().step > 2, full)
    job = er.ElasticTrainer(raise_at_once, train_loop_config={}, scaling_config=one, run_config=run).submit()
    with pytest.raises(NameError, match="optimiser") as raised:
        job.result(timeout=180)
    assert "in raise_at_once" in str(raised.value) or "raise_at_once" in repr(raised.getrepr(style="long"))
    lost = [event for event in job.events() if event.kind is EventKind.WARNING]
    assert len(lost) == 1 and full.status().workers == 1 and not failures()
    assert job.events()[-1].time_s - lost[0].time_s < 60.0
    full.stop()
    full.result(timeout=180)
