"""Worker processes that go from trial to trial, on a real cluster."""

from __future__ import annotations

import asyncio
import time

import cloudpickle
import pytest
import ray
from ray.exceptions import RayActorError

from elastic_ray.job_spec import TrialSpec
from elastic_ray.warm_pool.processes import setup_of
from tests.job.specs import spec
from tests.local_cluster import LocalCluster
from tuning.sweep import _kind
from tuning.sweep_processes import SweepProcesses
from tuning.trial_job import shown_parameters


@pytest.mark.thorough
def test_a_process_serves_runs_in_turn_safe_from_old(shared_cluster: LocalCluster) -> None:
    pool, node = SweepProcesses("sweep"), ray.get_runtime_context().get_node_id()
    kind = spec(trial=TrialSpec(controller="", keep_s=30.0))
    assert cloudpickle.loads(cloudpickle.dumps(kind)) == kind, "else no process would ever fit another trial"
    pool.admit("first", kind)
    lent = asyncio.run(pool.lend("first", node))
    assert lent is not None
    process, ready = lent
    assert not ready
    pid = ray.get(process.prepare.remote(setup_of(kind)), timeout=180).pid
    pool.complete("first", {process: True})
    assert asyncio.run(pool.lend("first", node)) is None, "a lend that comes after the run's end"
    pool.admit("second", kind)
    assert asyncio.run(pool.lend("second", node)) == (process, True)
    pool.complete("first")  # its controller waited for another trial in vain, and is gone
    pool.expire(time.monotonic() + 60.0)
    assert ray.get(process.prepare.remote(setup_of(kind)), timeout=180).pid == pid
    pool.take_back("second", process, fit=False)

    def ask_until_gone() -> None:  # a kill takes a moment
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            ray.get(process.prepare.remote(setup_of(kind)), timeout=180)

    with pytest.raises(RayActorError):
        ask_until_gone()


def test_trials_that_differ_in_parameters_share_processes() -> None:
    config = {"lr": 3e-4, "net": {"width": 128, "kind": "x" * 99}, "data": object(), "bad": float("nan"), "bias": True}
    shown = shown_parameters(config)
    assert shown == {"lr": 3e-4, "net/width": 128, "net/kind": "x" * 40, "bias": True}
    kinds = [_kind(spec(job=j, trial=TrialSpec(controller=j, parameters=p))) for j, p in (("a", shown), ("b", {}))]
    assert kinds[0] == kinds[1]
