"""A running job is branched at larger batches, and its own batch stays below what they find."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch

import elastic_ray as er
from elastic_ray.batch.branch_losses import BranchError
from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
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
    handle = submit(tmp_path, name="slow", rate=0.01)
    with pytest.raises(BranchError, match=r"'slow' cannot be branched: it is \w+ and has not told of a step"):
        handle.branch()
    storage = RunStorage(handle.storage_path)
    wait_until(lambda: bool(state_files(storage)) and handle.status().step > 20, handle)
    before = handle.status()
    found = handle.branch(steps=160, timeout=300)
    batch = found.losses[0].batch_size
    assert [each.batch_size for each in found.losses][:2] == [batch, 2 * batch] and found.samples == 160 * batch
    assert found.losses[1].worse > 0.02, str(found)
    assert found.critical_batch == batch
    events = [event for event in handle.events() if event.kind is EventKind.BRANCH]
    assert len(events) == 2 and events[-1].detail["critical_batch"] == batch
    after = handle.status()
    assert (after.phase, after.generation) == (JobPhase.RUNNING, before.generation) and after.step > before.step
    wait_until(lambda: handle.status().batch_size <= batch, handle)
    assert not list(tmp_path.glob("slow-branch-*")), "nothing is left of them"
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
