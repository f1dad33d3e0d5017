"""The commands against a cluster on which jobs run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import pytest
import ray
from ray._private.utils import publish_error_to_driver

import elastic_ray as er
from elastic_ray.cli import cluster
from elastic_ray.observe.page.source import ActionRefusedError
from elastic_ray.observe.page.sources.live import LiveCluster
from placement.ray_cluster.named_actors import create_on_head
from tests.cli.commands import run
from tests.job.controllers import kill_controller
from tests.job.jobs import start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000)]


def test_warnings_of_the_cluster_do_not_spoil_output(ray_cluster: Any) -> None:
    over = threading.Event()

    def warn() -> None:
        client = ray.get_runtime_context().worker.gcs_client  # what publishes for raylets as well
        while not over.wait(0.02):
            publish_error_to_driver("any", "a raylet warns", gcs_client=client)

    warning = threading.Thread(target=warn)
    warning.start()
    try:
        environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address}
        command = [sys.executable, "-m", "elastic_ray.cli", "jobs", "--json"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    finally:
        over.set()
        warning.join()
    assert (json.loads(listed.stdout), listed.stderr) == ([], "")


def process_id() -> int:
    """Of the process that looks."""
    return os.getpid()


def test_a_look_at_nodes_leaves_no_process(ray_cluster: Any) -> None:
    (pid,) = cluster.on_every_node(process_id, [ray_cluster.head_id]).values()
    deadline = time.monotonic() + 30.0
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "it would keep the memory that CUDA takes"
        time.sleep(0.1)


def test_a_job_is_listed_explained_resized_and_stopped(ray_cluster: Any, tmp_path: Path) -> None:
    assert "no job runs" in run(ray_cluster, "status", "seen", code=1).stderr
    budget = er.SchedulingConfig(budget_usd=5.0)
    handle = start(tmp_path, workers=(1, 3), name="seen", epochs=100_000, scheduling=budget)
    wait_until(lambda: handle.status().step > 3, handle)

    (row,) = json.loads(run(ray_cluster, "jobs", "--json").stdout)
    assert (row["job"], row["phase"], row["min_workers"], row["max_workers"]) == ("seen", "running", 1, 3)
    assert row["storage_path"].endswith("/runs/seen") and row["held_at"] is None and row["reason"]
    head, line = run(ray_cluster, "jobs").stdout.splitlines()
    assert head.split()[:3] == ["JOB", "PHASE", "WORKERS"] and line.split()[:2] == ["seen", "running"]

    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address}
    command = [sys.executable, "-m", "elastic_ray.cli", "jobs"]  # as installed: a process of its own, into a pipe
    listed = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert listed.returncode == 0 and listed.stderr == "", listed.stderr
    assert [each.split()[0] for each in listed.stdout.splitlines()] == ["JOB", "seen"] and "\x1b" not in listed.stdout

    assert "held at 2 workers" in run(ray_cluster, "resize", "seen", "2").stdout
    # Growth that was on its way when the command came is taken back first.
    told_of_two = ("job seen: running, workers 2,", "job seen has 2 workers")
    wait_until(lambda: all(line in run(ray_cluster, "status", "seen").stdout for line in told_of_two), handle)
    refused = run(ray_cluster, "resize", "seen", "9", code=1).stderr
    assert "between 1 and 3" in refused and "Traceback" not in refused
    status = run(ray_cluster, "status", "seen").stdout
    assert "budget_usd=5 is not watched" in status  # the allocator here knows no prices
    assert "rank 1: process" in status and "0 -> 2 workers" in status
    told = json.loads(run(ray_cluster, "status", "seen", "--json", "--events", "1").stdout)
    assert told["job"]["held_at"] == 2 and len(told["events"]) == 1
    assert [worker["rank"] for worker in told["workers"]] == [0, 1] and told["explanation"]["job"] == "seen"
    assert "allocator's again" in run(ray_cluster, "resize", "seen", "auto").stdout
    for command in (("drain", ""), ("nodes", "--forgive", "")):  # an unset variable is not this one node
        assert "address, but '' means 0" in run(ray_cluster, *command, code=1).stderr

    (node,) = json.loads(run(ray_cluster, "nodes", "--json").stdout)
    assert node["node_id"] == ray_cluster.head_id and node["total"]["CPU"] == 4.0 and "seen" in node["jobs"]
    decisions = run(ray_cluster, "allocator", "--last", "50").stdout
    assert decisions.startswith("policy goodput; 1 job;") and "arrival" in decisions
    assert "one more worker" in run(ray_cluster, "allocator", "seen").stdout
    assert "no job 'other'" in run(ray_cluster, "allocator", "other", code=1).stderr
    assert "cannot rule this cluster now" in run(ray_cluster, "allocator", "set", "fifo", code=1).stderr
    assert "policy goodput shares" in run(ray_cluster, "allocator", "set", "goodput").stdout
    assert "since its submission: " in status and "left: " in status
    row = told["job"]
    parts = [row[f"{name}_s"] for name in ("waiting", "starting", "pausing", "catching_up", "training")]
    assert min(parts) >= 0 and 0 < sum(parts) < 3600 and 0 <= row["progress"] < 1
    seen = run(ray_cluster, "top").stdout  # once, into a pipe
    assert "policy goodput" in seen and "seen" in seen and "NODE" in seen
    assert "0 -> " in run(ray_cluster, "logs", "seen").stdout
    ends = run(ray_cluster, "simulate", "--live").stdout
    assert "present nodes" in ends and "->" not in ends.partition("REASON")[0] and "seen" in ends
    then = run(ray_cluster, "simulate", "--live", "--nodes", "cpu:1x1").stdout
    assert "-> 1" in then and "seen" in then
    assert "cluster must look like" in run(ray_cluster, "simulate", "--live", "--nodes", "x", code=2).stderr

    assert "it is not paused, it is running" in run(ray_cluster, "resume", "seen", code=1).stderr
    assert run(ray_cluster, "pause", "seen").stdout.startswith("job seen: paused, workers 0")
    assert "it is paused already" in run(ray_cluster, "pause", "seen", code=1).stderr
    (row,) = json.loads(run(ray_cluster, "jobs", "--json").stdout)
    assert (row["phase"], row["workers"], row["waits_for"]) == ("paused", 0, "")
    assert "there are slots" in run(ray_cluster, "resume", "seen").stdout
    kill_controller(handle)
    assert "job seen" in run(ray_cluster, "status", "seen").stdout
    kill_controller(handle)
    assert "stopped" in run(ray_cluster, "stop", "seen").stdout, "a controller that restarts has not ended"
    handle.result(timeout=180)

    failing = start(tmp_path, workers=1, name="bad", raise_at=3)
    failing.wait(180)
    deadline = time.monotonic() + 60.0
    while any(row["ended_s"] is None for row in json.loads(run(ray_cluster, "jobs", "--json").stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    bad, good = json.loads(run(ray_cluster, "jobs", "--json").stdout)
    assert (bad["job"], bad["phase"], good["job"], good["phase"]) == ("bad", "failed", "seen", "stopped")
    assert bad["message"] == 'KeyError: "the user\'s own mistake"' and bad["user"]
    said = run(ray_cluster, "status", "seen").stdout
    assert said.startswith("job seen: stopped ") and f"results: {good['storage_path']}" in said
    assert f"checkpoint: {good['checkpoint']}" in said and "since its submission" in said
    assert "job bad: failed" in run(ray_cluster, "status", "bad", code=1).stdout
    assert "'bad' has ended: failed, KeyError" in run(ray_cluster, "resize", "bad", "1", code=1).stderr
    assert "forgotten" in run(ray_cluster, "stop", "gone", code=1).stderr


@pytest.mark.thorough
def test_an_ended_job_is_not_resized(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=(1, 2), name="over", epochs=100_000, elastic={"lease_s": 600.0})
    wait_until(lambda: handle.status().step > 3, handle)
    handle.leave()  # its controller stays for the rest of the lease, which a busy machine must not outlast
    run(ray_cluster, "stop", "over", "--now")
    page = LiveCluster(ray_cluster.address, actions=True)
    deadline = time.monotonic() + 120.0
    while [each.phase for each in page.poll(time.time()).jobs if each.job == "over"] != ["stopped"]:
        assert time.monotonic() < deadline
    for size in ("2", "auto"):
        assert "it has ended (stopped)" in run(ray_cluster, "resize", "over", size, code=1).stderr
    for action in ("resize", "stop"):
        with pytest.raises(ActionRefusedError, match=r"has ended \(stopped\)"):
            page.act("over", action, 2)
    assert er.JobHandle.attach("over").result(timeout=180).error is None  # collects the result, and so ends it


def test_without_a_cluster_it_says_how_to_start_one() -> None:
    begun = time.monotonic()
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    command = [sys.executable, "-m", "elastic_ray.cli", "jobs"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert answer.returncode == 1 and "Traceback" not in answer.stderr
    assert "127.0.0.1:1" in answer.stderr and "ray start --head" in answer.stderr
    assert time.monotonic() - begun < 120


@pytest.mark.thorough
def test_each_rank_shows_its_output_and_its_stack(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=2, name="looked", epochs=100_000)
    wait_until(lambda: handle.status().step > 3, handle)
    logs = run(ray_cluster, "logs", "looked", "--rank", "1").stdout
    assert "--- std" in logs or "it has printed nothing yet" in logs
    stacks = run(ray_cluster, "stack", "looked").stdout
    assert stacks.count("Process ") == 2 and "rank 1:" in stacks and "traced.py" in stacks
    assert "rank 1:" not in run(ray_cluster, "stack", "looked", "--rank", "0").stdout
    wrong = run(ray_cluster, "stack", "looked", "--rank", "5", code=1).stderr
    assert "job 'looked' has no worker of rank 5 now, but 2 workers" in wrong
    assert "--rank shows the last lines" in run(ray_cluster, "logs", "looked", "--rank", "0", "-f", code=2).stderr
    handle.stop(now=True)
    handle.result(timeout=180)


class Mute:
    """In place of a controller whose process is stopped."""

    async def status(self, *_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    spec = stop = pause = workers = status


@pytest.mark.slow
@pytest.mark.parametrize("command", ["status", "stop", "pause", "resize"])
def test_commands_name_a_silent_controller_soon(ray_cluster: Any, command: str) -> None:
    mute = create_on_head(Mute, "job:mute")
    ray.get(mute.__ray_ready__.remote(), timeout=60)
    begun_s = time.monotonic()
    told = run(ray_cluster, command, "mute", *(["2"] if command == "resize" else []), code=1).stderr
    took_s = time.monotonic() - begun_s
    ray.kill(mute)
    assert "the controller of job 'mute' has not answered within 10 s" in told
    assert took_s < 13.0


def test_listings_do_without_an_allocator_that_hangs(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = start(tmp_path, workers=1, name="unheard", epochs=100_000)
    wait_until(lambda: handle.status().step > 3, handle)

    def hangs(timeout_s: float = 0.0) -> Any:
        raise click.ClickException("the allocator has not answered")

    monkeypatch.setattr(cluster, "snapshot", hangs)
    for command in (("jobs",), ("nodes",), ("status", "unheard")):
        listed = run(ray_cluster, *command)
        assert listed.stderr == "warning: the allocator has not answered\n" and listed.stdout
    assert "unheard" in run(ray_cluster, "jobs").stdout
    assert "the allocator has not answered" in run(ray_cluster, "top").stdout
    assert "has not answered" in run(ray_cluster, "allocator", code=1).stderr
    handle.stop()
