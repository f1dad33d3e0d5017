"""The cluster's pool of warm processes: what one job left unused another one runs in, and sees nothing of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train.v2.api.exceptions import TrainingFailedError

import elastic_ray as er
from elastic_ray.driver.handle import JobHandle
from elastic_ray.job.controller import start
from elastic_ray.warm_pool.client import environment_key
from elastic_ray.warm_pool.pool import CONTROLLERS, NAME, find_pool
from elastic_ray.warm_pool.processes import pool_client, setup_of
from elastic_ray.warm_pool.sizing import VARIABLE
from elastic_ray.worker.ownership import calling_owner
from placement.ray_cluster.named_actors import actors_named, aliases, names_of_actors
from tests.job.specs import spec
from tests.local_cluster import NAMESPACE, LocalCluster

pytestmark = pytest.mark.timeout(1000)

SCRIPT = """
import sys

import ray
from ray.train.v2.api.exceptions import TrainingFailedError
import ray.train

import elastic_ray as er
import helper


@ray.remote(num_cpus=0)
class Namesake:
    def value(self):
        return helper.VALUE


def train(config):
    import json, os, pathlib, time
    import inner
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=8)
    folder = pathlib.Path(config["folder"])
    for epoch in er.remaining_epochs_until(config["epochs"]):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        time.sleep(0.05)
        if epoch == 0:
            print("said by the train function of", helper.VALUE, flush=True)
            found = ray.get(ray.get_actor("namesake").value.remote())
            seen = {"pid": os.getpid(), "helper": helper.VALUE, "inner": inner.VALUE, "namesake": found}
            seen |= {"path": sys.path, "cwd": os.getcwd(), "environment": dict(os.environ)}
            (folder / "seen.part").write_text(json.dumps(seen))
            (folder / "seen.part").rename(folder / "seen.json")


if __name__ == "__main__":
    address, folder, name, epochs = sys.argv[1:]
    ray.init(address=address)
    namesake = Namesake.options(name="namesake").remote()
    er.ElasticTrainer(
        train,
        train_loop_config={"folder": folder, "epochs": int(epochs)},
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(name=name, storage_path=folder),
    ).fit()
"""


def end_pool() -> None:
    """End the pool, its processes and warm controllers, also those that start meanwhile."""
    while found := [actor for prefix in (NAME, CONTROLLERS) for _, actor in actors_named(prefix)]:
        for actor in found:
            ray.kill(actor)
        time.sleep(0.5)


@pytest.fixture(scope="module")
def pool_cluster() -> Iterator[LocalCluster]:
    """A cluster whose nodes were started with a pool; closing that leaves nothing."""
    before = os.environ[VARIABLE]
    os.environ[VARIABLE] = "per_node=2,quiet_s=1"
    try:
        cluster = LocalCluster(num_cpus=4)
    finally:
        os.environ[VARIABLE] = before
    yield cluster
    end_pool()
    leaks = cluster.leaks()
    cluster.shutdown()
    assert not leaks, leaks


def driver(cluster: LocalCluster, folder: Path, name: str, *, epochs: int) -> subprocess.Popen[str]:
    """A script of its own directory, with modules that only that has, trains on the cluster."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    for module in ("helper", "inner"):
        (folder / f"{module}.py").write_text(f"VALUE = {name!r}\n")
    command = [sys.executable, "script.py", cluster.address, str(folder), name, str(epochs)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.1)
    return found


def ready() -> dict[str, int]:
    """Processes of the pool that have imported everything, and their pids."""
    pool = find_pool()
    if pool is None:
        return {}
    names = {each.name for each in ray.get(pool.processes.remote(), timeout=180) if each.ready}
    return {name: pid for name, pid in alive().items() if name in names}


def alive() -> dict[str, int]:
    """Processes that were started for the pool, whoever has them now, and their pids."""
    return {name: pid for name, pid in actors().items() if name.startswith(f"{NAME}/")}


def actors() -> dict[str, int]:
    """Living actors of ours, and their pids."""
    from ray.core.generated import gcs_pb2

    accessor = ray._private.state.state._connect_and_get_accessor()
    table = [gcs_pb2.ActorTableData.FromString(row) for row in accessor.get_actor_table(None, None)]  # type: ignore[attr-defined]
    living = [a for a in table if a.state == gcs_pb2.ActorTableData.ActorState.ALIVE and a.ray_namespace == NAMESPACE]  # type: ignore[attr-defined]
    return {a.name: a.pid for a in living}


def seen(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "seen.json").read_text()))


@pytest.mark.slow
def test_an_unknown_pool_is_the_jobs_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "on")
    cluster = LocalCluster(num_cpus=1)
    try:
        asked = spec(storage_path=str(tmp_path))
        with pytest.raises(TrainingFailedError, match=f"{VARIABLE} must be 'off' or set some of .*has 'on'"):
            JobHandle(start(asked), asked).result(timeout=180)
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_warm_processes_show_nothing_of_the_job_before(pool_cluster: LocalCluster, tmp_path: Path) -> None:
    """Two scripts in two directories: each has its own modules, actors' names, path and output.

    A warm controller that dies comes back with its job.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    with driver(pool_cluster, first, "first", epochs=1_000_000) as script:
        wait_for(lambda: (first / "seen.json").exists() or script.poll() is not None)
        warm = wait_for(ready)
        er.JobHandle.attach("first").stop()
        assert script.wait(60) == 0, script.stdout and script.stdout.read()
    assert seen(first)["pid"] not in warm.values(), "a job's own process came into the pool"

    wait_for(lambda: names_of_actors(CONTROLLERS))
    with driver(pool_cluster, second, "second", epochs=1_000_000) as script:
        wait_for(lambda: (second / "seen.json").exists() or script.poll() is not None)
        ((own, _),) = aliases("job:second", whole=True)
        assert own.startswith(CONTROLLERS) and "job:second" not in actors(), "its controller was not warm"
        os.kill(killed := actors()[own], signal.SIGKILL)
        wait_for(lambda: actors().get(own, killed) != killed)
        er.JobHandle.attach("second").stop()
        output = script.communicate(timeout=180)[0]
    wait_for(lambda: not aliases("job:second"))
    assert script.returncode == 0, output
    one, other = seen(first), seen(second)
    assert other["pid"] in warm.values(), "it did not run in a process of the pool"
    assert (other["helper"], other["inner"], other["namesake"]) == ("second", "second", "second")
    assert str(second) in other["path"] and str(first) not in other["path"]
    assert other["cwd"] == one["cwd"]
    assert "said by the train function of second" in output, "what it printed was not shown by its driver"
    told = {name for name in one["environment"] if one["environment"][name] != other["environment"].get(name)}
    assert all(name.startswith("RAY_") for name in told), told
    wait_for(lambda: other["pid"] not in alive().values())


@pytest.mark.thorough
def test_a_new_pool_finds_its_processes(pool_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "quiet_s=1")
    end_pool()  # of what the test before has left
    node = ray.get_runtime_context().get_node_id()
    client = pool_client(spec(), calling_owner("job:mine"))
    asyncio.run(client.order({node: 2}))
    assert not ready() and not ray.get(find_pool().processes.remote(), timeout=60), "beside a job's first epochs"
    time.sleep(1.5)  # quiet_s has passed
    asyncio.run(client.order({node: 2}))
    before = wait_for(ready)
    first = actors()[NAME]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: actors().get(NAME, first) != first)
    assert wait_for(ready) == before
    assert {name.split("/")[1] for name in before} == {environment_key({})}

    mine, _ = asyncio.run(client.take(node))
    assert mine is not None and not before.keys() & ready().keys()
    assert ray.get(mine.prepare.remote(setup_of(spec())), timeout=180).pid in before.values()
    assert not ray.get(mine.claim.remote(calling_owner("job:another")), timeout=180), "one process, two jobs"
