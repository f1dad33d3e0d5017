"""Workers that fail when they come to a job that trains: they are given up, and the others train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train

import elastic_ray as er
from elastic_ray.errors import TrainFunctionError
from elastic_ray.events import EventKind
from placement.allocator.actor import find_allocator
from tests.job.jobs import wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(600)]

STEPS = 10


def train(config: dict[str, Any]) -> int:
    """Train until a file says so. ``fails``: where the second process that runs this raises."""
    import time

    import torch

    folder = Path(config["folder"])
    number = len(list(folder.glob("process-*")))
    (folder / f"process-{number}").touch()
    fails = config["fails"] if number == 1 else ""
    if config["fails"] == "twice":  # a process may define a library's function once
        torch.library.define("newcomers::once", "(Tensor x) -> Tensor")
    if fails == "data":
        raise OSError(5, "Input/output error", "/data/shard-17")
    model: torch.nn.Module = torch.nn.Linear(1, 2 if fails == "model" else 1)
    if config["fails"] == "twice":  # what the tests before have measured of speeds is of another model
        model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Rows(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> torch.Tensor:
            if fails == "first batch":
                raise OSError(5, "Input/output error", "/data/shard-17")
            return torch.ones(1)

    wrapped = er.AdaptiveDataParallel(model, optimizer)
    if fails == "states":
        er.register_state("more", torch.nn.Linear(1, 1))
    loader, enough = er.AdaptiveDataLoader(Rows(), batch_size=8), er.Accumulator()
    for _ in er.remaining_epochs_until(10_000):
        for x in loader:
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            enough["asked"] += float((folder / "enough").exists())  # a rank may see the file an epoch before the other
            time.sleep(0.01)  # a job long enough for newcomers
        if enough["asked"]:
            break
    return er.get_context().get_global_step()


@pytest.mark.parametrize(
    "fails",
    [
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ("data", "first batch")),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("model", "states")),
    ],
)
def test_a_newcomer_that_fails_ends_no_job_that_trains(ray_cluster: Any, tmp_path: Path, fails: str) -> None:
    job = er.ElasticTrainer(
        train,
        train_loop_config={"folder": str(tmp_path), "fails": fails},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path / "runs")),
    ).submit()
    job.resize(1)
    wait_until(lambda: job.status().step >= STEPS, job)
    job.resize(2)
    wait_until(lambda: any(event.kind is EventKind.CANCELLED for event in job.events()), job)
    told = next(event for event in job.events() if event.kind is EventKind.CANCELLED)
    assert told.reason.startswith("joiner w2 is given up, it raised ")
    assert "Traceback (most recent call last)" in told.detail["traceback"]
    if fails in ("data", "first batch"):
        assert "/data/shard-17" in told.reason
    wait_until(lambda: job.status().workers == 2, job)  # the next one is well
    after = job.status().step
    wait_until(lambda: job.status().step >= after + STEPS, job)
    (tmp_path / "enough").touch()
    result = job.result(timeout=180)
    assert result.return_value >= after + STEPS
    assert EventKind.RESTART not in [event.kind for event in job.events()]


@pytest.mark.thorough
def test_at_the_start_an_error_is_the_programs(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "process-0").touch()
    with pytest.raises(TrainFunctionError, match="shard-17"):
        er.ElasticTrainer(
            train,
            train_loop_config={"folder": str(tmp_path), "fails": "data"},
            scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(storage_path=str(tmp_path / "runs")),
        ).fit()


@pytest.mark.thorough
def test_once_only_call_costs_a_returning_worker_a_process(ray_cluster: Any, tmp_path: Path) -> None:
    job = er.ElasticTrainer(
        train,
        train_loop_config={"folder": str(tmp_path), "fails": "twice"},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path / "runs")),
    ).submit()
    wait_until(lambda: job.status().workers == 2, job)
    job.resize(1)
    wait_until(lambda: job.status().workers == 1, job)
    job.resize(2)
    wait_until(lambda: job.status().workers == 2 and job.workers()[1].worker == "w4", job)
    (told,) = (event for event in job.events() if event.kind is EventKind.CANCELLED)
    assert told.reason.startswith("joiner w3 is given up, it raised RuntimeError: ")
    assert told.reason.endswith(", in a process that had run the function before; the next one is a fresh one")
    told = ray.get(find_allocator().snapshot.remote()).node_failures
    assert not [each for each in told if job.job in each.jobs], "no node is to blame for it"
    (tmp_path / "enough").touch()
    job.result(timeout=180)
