"""A sweep's actor on a real cluster, with a controller that behaves as no working one does."""

from __future__ import annotations

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


class Restarted:
    """A controller that Ray has restarted after its trial: it ends before long, and knows of nothing to give back."""

    async def spec(self) -> None:
        """It is alive."""

    async def close(self) -> None:
        """As well."""


def trial(run: str, folder: Path) -> JobSpec:
    where = {"storage_path": str(folder / run), "bundle": {"none_such": 1.0}}
    return spec(job=run, trial=TrialSpec(controller=run, keep_s=30.0), **where)


def test_what_a_restarted_controller_keeps_ends_with_it(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    node = ray.get_runtime_context().get_node_id()
    sweep, restarted = find_sweep("restarts", None), ray.remote(Restarted).options(num_cpus=0).remote()
    ray.get(sweep.attached.remote(trial("earlier", tmp_path), restarted), timeout=180)
    lent, _ = ray.get(sweep.lend.remote("earlier", node), timeout=180)
    ray.get(sweep.closed.remote("earlier"), timeout=180)
    controller, _ = ray.get(sweep.open.remote(trial("later", tmp_path)), timeout=180)
    ray.kill(restarted)
    deadline = time.monotonic() + 10  # the sweep itself, without which nothing stays, ends some 20 s later
    while _lives(lent):
        assert time.monotonic() < deadline, "nobody ends it"
        time.sleep(0.1)
    ray.get(controller.stop.remote(now=True), timeout=180)
    for each in (controller.host, sweep):
        ray.kill(each)


def _lives(process: Any) -> bool:
    try:
        ray.get(process.memory_bytes.remote(), timeout=180)
    except RayActorError:
        return False
    return True
