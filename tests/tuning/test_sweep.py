"""A sweep's actor on a real cluster, with controllers that behave as no working one does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from elastic_ray.job_spec import JobSpec, TrialSpec
from tests.job.specs import spec
from tests.local_cluster import LocalCluster
from tuning.sweep import find_sweep

pytestmark = pytest.mark.slow


class Stalled:
    """A controller that gets round to nothing new."""

    async def spec(self) -> None:
        """It is alive."""

    async def renew(self, spec: JobSpec) -> str:
        """Later than the sweep waits."""
        await asyncio.sleep(600)
        raise AssertionError("it is to be ended before")


class Restarted:
    """A controller that Ray has restarted after its trial: it takes no other one, and ends before long."""

    async def spec(self) -> None:
        """It is alive."""

    async def renew(self, spec: JobSpec) -> str:
        """It knows of nothing that it has given back."""
        return ""


def trial(run: str, folder: Path) -> JobSpec:
    where = {"storage_path": str(folder / run), "bundle": {"none_such": 1.0}}
    return spec(job=run, trial=TrialSpec(controller=run, keep_s=30.0), **where)


def test_a_silent_controller_cannot_run_beside_the_next(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    node = ray.get_runtime_context().get_node_id()
    sweep, stalled = find_sweep("stalls", None), ray.remote(Stalled).options(num_cpus=0).remote()
    ray.get(sweep.attached.remote(trial("first", tmp_path), stalled), timeout=180)
    ray.get(stalled.spec.remote(), timeout=180)  # type: ignore[attr-defined]
    vacating, _ = ray.get(sweep.lend.remote("first", node), timeout=180)
    ray.get(sweep.closed.remote("first"), timeout=180)
    opening = sweep.open.remote(trial("second", tmp_path))
    taken, _ = _until_lent(sweep, "second", node)  # what it has borrowed meanwhile
    controller, name, _ = ray.get(opening, timeout=180)
    assert name == "second"
    for gone in (stalled.spec, vacating.memory_bytes, taken.memory_bytes):
        with pytest.raises(RayActorError):
            ray.get(gone.remote(), timeout=180)
    process, _ = ray.get(sweep.lend.remote("second", node), timeout=180)
    assert process not in (vacating, taken)
    for each in (controller, sweep):
        ray.kill(each)


def test_what_a_restarted_controller_keeps_ends_with_it(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    node = ray.get_runtime_context().get_node_id()
    sweep, restarted = find_sweep("restarts", None), ray.remote(Restarted).options(num_cpus=0).remote()
    ray.get(sweep.attached.remote(trial("earlier", tmp_path), restarted), timeout=180)
    lent, _ = ray.get(sweep.lend.remote("earlier", node), timeout=180)
    ray.get(sweep.closed.remote("earlier"), timeout=180)
    controller, name, _ = ray.get(sweep.open.remote(trial("later", tmp_path)), timeout=180)
    assert name == "later"
    ray.kill(restarted)
    deadline = time.monotonic() + 10  # the sweep itself, without which nothing stays, ends some 20 s later
    while _lives(lent):
        assert time.monotonic() < deadline, "nobody ends it"
        time.sleep(0.1)
    for each in (controller, sweep):
        ray.kill(each)


def _until_lent(sweep: Any, run: str, node: str) -> Any:
    deadline = time.monotonic() + 30
    while (lent := ray.get(sweep.lend.remote(run, node), timeout=180)) is None:
        assert time.monotonic() < deadline, "nothing was lent within 30 s"
        time.sleep(0.02)
    return lent


def _lives(process: Any) -> bool:
    try:
        ray.get(process.memory_bytes.remote(), timeout=180)
    except RayActorError:
        return False
    return True
