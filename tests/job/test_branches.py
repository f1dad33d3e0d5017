"""A running job is branched at larger batches, and its own batch stays below what they find."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
from click.testing import CliRunner

import elastic_ray as er
from elastic_ray.batch.branch_losses import BranchError
from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.cli.app import cli
from elastic_ray.events import EventKind, JobPhase
from tests.job.jobs import start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(600), pytest.mark.slow]


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=config["rate"])
    model: Any = er.AdaptiveDataParallel(net, optimizer, scaling_rule="none")
    inputs = torch.randn(4096, 3)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1).sin()), batch_size=16)
    loader.autoscale_batch_size(max_batch_size=config["most"])
    for _ in er.remaining_epochs_until(100_000):
        for x, y in loader:
            time.sleep(0.01)  # a step takes some time
            optimizer.zero_grad()
            loss = (model(x).squeeze(1) - y).square().mean()
            loss.backward()
            optimizer.step()
            er.report({"loss": float(loss)})


def submit(folder: Path, *, name: str, rate: float, most: int = 64, **elastic: Any) -> er.JobHandle:
    return er.ElasticTrainer(
        train,
        train_loop_config={"rate": rate, "most": most},
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        elastic_config=er.ElasticConfig(checkpoint_interval_s=1.0, **elastic),
        run_config=ray.train.RunConfig(name=name, storage_path=str(folder)),
    ).submit()


def test_branches_find_where_samples_lose_their_worth(ray_cluster: Any, tmp_path: Path) -> None:
    """With rates far from the best, and no rule that raises them, half as many steps learn half as much."""
    handle = submit(tmp_path, name="slow", rate=0.002)
    with pytest.raises(BranchError, match=r"'slow' cannot be branched: it is \w+ and has not told of a step"):
        handle.branch()
    storage = RunStorage(handle.storage_path)
    wait_until(lambda: bool(state_files(storage)) and handle.status().step > 20, handle)
    before = handle.status()
    found = handle.branch(steps=320, timeout=300)
    batch = found.losses[0].batch_size
    assert [each.batch_size for each in found.losses][:2] == [batch, 2 * batch] and found.samples == 320 * batch
    assert found.losses[1].worse > 0 and found.losses[-1].worse > 0.02, str(found)
    assert found.critical_batch == batch
    events = [event for event in handle.events() if event.kind is EventKind.BRANCH]
    assert len(events) == 2 and events[-1].detail["critical_batch"] == batch
    after = handle.status()
    assert (after.phase, after.generation) == (JobPhase.RUNNING, before.generation) and after.step > before.step
    wait_until(lambda: handle.status().batch_size <= batch, handle)
    assert not list(tmp_path.glob("slow-branch-*")), "nothing is left of them"

    told = CliRunner().invoke(
        cli, ["branch", "slow", "--factors", "2", "--steps", "80", "--tolerance", "0.5", "--json"]
    )
    assert told.exit_code == 0, told.output
    again = json.loads(told.stdout)
    assert again["critical_batch"] == 2 * batch and [each["batch_size"] for each in again["losses"]] == [
        batch,
        2 * batch,
    ]
    refused = CliRunner().invoke(cli, ["branch", "slow", "--factors", "1"])
    assert refused.exit_code == 2 and "factors must be rising whole numbers from 2" in refused.output
    handle.stop(now=True)


def test_idle_slots_have_branches_by_themselves(ray_cluster: Any, tmp_path: Path) -> None:
    handle = submit(tmp_path, name="idle", rate=0.05, most=1024, branch_when_idle=True)  # more than it will choose

    def results() -> list[Any]:
        events = [event for event in handle.events() if event.kind is EventKind.BRANCH]
        return [event.detail for event in events if "critical_batch" in event.detail]

    wait_until(lambda: bool(results()), handle, timeout_s=200)
    (found,) = results()
    assert found["step"] >= 100 and len(found["losses"]) >= 2
    handle.stop(now=True)


def train_seesaw() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 1500 else 0.01)
    model: Any = er.AdaptiveDataParallel(net, optimizer, decay, schedule="seesaw")
    inputs = torch.randn(4096, 3)
    targets = inputs.sum(1) + 3 * torch.randn(4096)  # a gradient of noise, whose scale allows the largest batch
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=16)
    loader.autoscale_batch_size(max_batch_size=160)
    for _ in er.remaining_epochs_until(100_000):
        for x, y in loader:
            time.sleep(0.02)  # a step takes some time
            optimizer.zero_grad()
            loss = (model(x).squeeze(1) - y).square().mean()
            loss.backward()
            optimizer.step()
            decay.step()
            er.report({"loss": float(loss)})


def test_seesaw_grows_to_the_measured_batch_alone(ray_cluster: Any, tmp_path: Path) -> None:
    """The loader allows ten times the batch, and the decay asks for a hundred."""
    handle = er.ElasticTrainer(
        train_seesaw,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        elastic_config=er.ElasticConfig(checkpoint_interval_s=1.0),
        run_config=ray.train.RunConfig(name="seesaw", storage_path=str(tmp_path)),
    ).submit()
    storage = RunStorage(handle.storage_path)
    wait_until(lambda: bool(state_files(storage)) and handle.status().step > 20, handle)
    found = handle.branch(factors=(2,), steps=80, tolerance=0.5, timeout=200)
    assert found.critical_batch == 32, str(found)
    wait_until(lambda: handle.status().batch_size == 32, handle)
    reached = handle.status().step
    wait_until(lambda: handle.status().step > reached + 200, handle)
    assert handle.status().batch_size == 32
    handle.stop(now=True)


def test_jobs_that_cannot_be_branched_say_why(ray_cluster: Any, tmp_path: Path) -> None:
    handle = submit(tmp_path, name="unsaved", rate=0.1, automatic_checkpoints=False)
    wait_until(lambda: handle.status().step > 2, handle)
    with pytest.raises(BranchError, match="automatic_checkpoints=False\\) saves no state that a branch could start"):
        handle.branch()
    handle.stop(now=True)
    fixed = start(tmp_path, workers=1, epochs=100_000, name="fixed")
    wait_until(lambda: fixed.status().step > 2, fixed)
    with pytest.raises(BranchError, match="its batch is fixed"):
        fixed.branch()
    fixed.stop(now=True)
