"""A process of another user of the machine, against a job that trains and changes its size."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.job import traced
from tests.job.jobs import start, wait_until
from tests.job.stranger import is_a_store

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(1000)]

NOBODY = 65534
EVERYWHERE = ("0.0.0.0", "::")


class Plain:
    """An actor as anybody's: what its process listens on is Ray's."""

    def pid(self) -> int:
        return os.getpid()


def listeners(pids: set[int]) -> dict[int, set[tuple[str, int]]]:
    """Where these processes listen."""
    found: dict[int, set[tuple[str, int]]] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            connections = psutil.Process(pid).net_connections("tcp")
            found[pid] = {tuple(each.laddr) for each in connections if each.status == "LISTEN"}
    return found


def pids_of(handle: Any) -> dict[int, str]:
    """The job's processes: its controller and all workers, and the names of their classes."""
    from ray.core.generated import gcs_pb2

    accessor = ray._private.state.state._connect_and_get_accessor()
    found = {}
    for row in accessor.get_actor_table(None, None):
        actor = gcs_pb2.ActorTableData.FromString(row)  # type: ignore[attr-defined]
        alive = gcs_pb2.ActorTableData.ActorState.Name(actor.state) == "ALIVE"  # type: ignore[attr-defined]
        if alive and (actor.name == f"job:{handle.job}" or actor.class_name == "WorkerProcess"):
            found[int(actor.pid)] = actor.class_name
    return found


class Watch:
    """Tells a stranger's process where the job's processes listen, again and again."""

    def __init__(self, handle: Any, stranger: Any) -> None:
        self._handle, self._stranger = handle, stranger
        self._ended = threading.Event()
        self.seen: dict[int, set[tuple[str, int]]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            now = listeners(set(pids_of(self._handle)))
            for pid, where in now.items():
                self.seen.setdefault(pid, set()).update(where)
            ports = [
                ("127.0.0.1" if host in EVERYWHERE else host, port) for each in now.values() for host, port in each
            ]
            self._stranger.stdin.write(json.dumps(ports) + "\n")
            self._stranger.stdin.flush()

    def end(self) -> dict[str, list[int]]:
        """What the stranger has found."""
        self._ended.set()
        self._thread.join(10)
        output, _ = self._stranger.communicate(timeout=180)
        found: dict[str, list[int]] = json.loads(output)
        return found


@contextlib.contextmanager
def stranger_against(handle: Any) -> Iterator[Watch]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.job.stranger", str(NOBODY)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:
        yield Watch(handle, process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_the_stranger_knows_a_store_when_it_meets_one() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert is_a_store("127.0.0.1", store.port)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_user_can_neither_read_end_nor_change_job(ray_cluster: Any, tmp_path: Path) -> None:
    plain: Any = ray.remote(Plain)
    plain = plain.options(num_cpus=0).remote()
    pid = ray.get(plain.pid.remote(), timeout=180)
    of_ray = len([host for host, _ in listeners({pid})[pid] if host in EVERYWHERE])
    ray.kill(plain)
    handle = start(tmp_path, workers=(1, 3), epochs=10_000, pause_s=0.02)
    with stranger_against(handle) as watch:
        for size in (2, 3, 1, 2):
            handle.resize(size)
            wait_until(lambda size=size: handle.status().workers == size, handle, 90)
        [controller] = [pid for pid, name in pids_of(handle).items() if name == "JobController"]
        assert "libtorch" not in Path(f"/proc/{controller}/maps").read_text(), (
            "it costs a head node 120 MB for each job"
        )
        handle.stop()
        handle.result(timeout=180)
        found = watch.end()
    assert found["stores"] == [] and found["connected"]
    assert len(watch.seen) >= 3, "a controller and two workers"
    for pid, where in watch.seen.items():
        assert len([host for host, _ in where if host in EVERYWHERE]) <= of_ray, (pid, where, of_ray)
    lines = traced.read(tmp_path / "trace")
    traced.check_identical(lines)
    _check_epochs(lines)
    assert not Path("/tmp/elastic-ray-was-here").exists()


def _check_epochs(lines: list[dict[str, Any]], samples: int = 192) -> None:
    """Every epoch that ended has each sample once."""
    newest: dict[int, int] = {}
    for line in lines:
        if line["kind"] == "step":
            newest[line["step"]] = max(line["generation"], newest.get(line["step"], 0))
    epochs: dict[int, list[int]] = {}
    for line in lines:
        if line["kind"] == "step" and line["generation"] == newest[line["step"]]:
            epochs.setdefault(line["epoch"], []).extend(line["indices"])
    assert len(epochs) > 1
    for epoch in sorted(epochs)[:-1]:
        assert sorted(epochs[epoch]) == list(range(samples)), f"epoch {epoch}"
