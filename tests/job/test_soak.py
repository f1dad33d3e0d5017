"""Several jobs while nodes come, drain and die, workers are killed, and the allocator with them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import elastic_ray as er
from elastic_ray.events import JobPhase
from placement.actor import NAME, NAMESPACE
from tests.job import traced
from tests.job.jobs import start
from tests.local_cluster import LocalCluster

pytestmark = [pytest.mark.ray_cluster(num_cpus=4)]

SLOTS = 2  # of a node
MOST_NODES = 4


class Trouble:
    """Does something to the cluster, again and again; the same seed does the same in the same state."""

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self.done: list[str] = []

    def one(self, jobs: list[er.JobHandle]) -> None:
        """One of what may happen now."""
        nodes = list(self._cluster.added)
        options = [self._kill_worker, self._kill_allocator]
        if len(nodes) < MOST_NODES:
            options += [self._add_node, self._add_node]
        if len(nodes) > 1:
            options += [self._drain_node, self._kill_node]
        what = self._random.choice(options)
        what(jobs)
        self.done.append(what.__name__.strip("_"))

    def _add_node(self, jobs: list[er.JobHandle]) -> None:
        self._cluster.add_node(num_cpus=0, resources={"slot": SLOTS})

    def _drain_node(self, jobs: list[er.JobHandle]) -> None:
        """With notice: it goes when nobody is on it any more, or after 20 s."""
        node = self._random.choice(self._cluster.added)
        self._cluster.drain_node(node, deadline_s=20.0)
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline and any(w.node == node.node_id for job in jobs for w in workers(job)):
            time.sleep(0.1)
        self._cluster.remove_node(node)

    def _kill_node(self, jobs: list[er.JobHandle]) -> None:
        self._cluster.remove_node(self._random.choice(self._cluster.added))

    def _kill_worker(self, jobs: list[er.JobHandle]) -> None:
        pids = [worker.pid for job in jobs for worker in workers(job)]
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), signal.SIGKILL)

    def _kill_allocator(self, jobs: list[er.JobHandle]) -> None:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(NAME, namespace=NAMESPACE), no_restart=False)


def workers(job: er.JobHandle) -> tuple[Any, ...]:
    try:
        return () if job.done() else job.workers()
    except TimeoutError:
        return ()


@pytest.mark.parametrize(
    "duration_s, seed",
    [
        pytest.param(30.0, 1, marks=pytest.mark.timeout(240)),
        pytest.param(600.0, 2, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_every_job_ends_whole_and_nothing_is_left(
    ray_cluster: LocalCluster, tmp_path: Path, duration_s: float, seed: int
) -> None:
    trouble = Trouble(ray_cluster, seed)
    for _ in range(3):
        trouble._add_node([])
    before = psutil.Process().num_fds()
    running: dict[Path, er.JobHandle] = {}
    ended: dict[Path, er.JobHandle] = {}
    end = time.monotonic() + duration_s
    wait = random.Random(seed)
    while time.monotonic() < end or running:
        late = time.monotonic() >= end
        while len(running) < 3 and not late:
            folder = tmp_path / f"job{len(running) + len(ended)}"
            folder.mkdir()
            running[folder] = start(
                folder,
                workers=(1, 4),
                epochs=wait.choice([6, 15, 30]),
                pause_s=0.05,
                bundle={"slot": 1.0},
                max_failures=-1,
                elastic={"checkpoint_interval_s": 1.0, "heartbeat_timeout_s": 5.0},
            )
        time.sleep(wait.uniform(1.0, 5.0))
        if not late:
            trouble.one(list(running.values()))
        for folder in [folder for folder, job in running.items() if job.done()]:
            ended[folder] = running.pop(folder)
        assert time.monotonic() < end + 180, f"not ended: {[job.status() for job in running.values()]}"
    for folder, job in ended.items():
        job.result(timeout=30)
        assert job.status().phase is JobPhase.FINISHED
        traced.account(folder / "trace")  # every step is there, every sample once an epoch, all ranks the same
    print(f"{len(ended)} jobs, {len(trouble.done)} troubles: {', '.join(trouble.done)}")
    assert ended and trouble.done
    ray_cluster.remove_added_nodes()
    deadline = time.monotonic() + 20
    while (left := left_behind()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, f"still there: {left}"
    assert psutil.Process().num_fds() <= before + 20, "files or sockets are left open"


def left_behind() -> list[str]:
    """Processes of workers and controllers below this one (Ray's own stay)."""
    names = ("ray::Worker", "ray::JobController", "ray::NoticeWatcher")
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith(names):
            found.append(f"{process.pid} {title}")
    return found
