"""One script under Ray Train's own TorchTrainer and as an elastic job that loses rank 0, and then all workers."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.train.torch
import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from elastic_ray.events import EventKind
from tests.job.jobs import kinds, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=5), pytest.mark.timeout(1000)]

EPOCHS, SAMPLES, BATCH = 15, 96, 8


def script(config: dict[str, Any]) -> None:
    """As people write it for Ray Train, with a checkpoint in each third epoch; it knows nothing of elastic jobs."""
    folder = Path(config["folder"])
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader: Any = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=BATCH))
    torch.manual_seed(0)
    model: Any = ray.train.torch.prepare_model(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as path:
            state = torch.load(os.path.join(path, "state.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    for epoch in range(first, EPOCHS):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # as long as the test asks, so that a change falls into the training
            time.sleep(float((folder / "pause").read_text()))
        metrics = {"epoch": epoch, "loss": loss.item()}
        if epoch % 3 != 2:
            ray.train.report(metrics)
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, os.path.join(path, "state.pt"))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(path))
    if ray.train.get_context().get_world_rank() == 0:
        torch.save(model.module.state_dict(), folder / "weights.pt")


def set_pause(folder: Path, pause_s: float) -> None:
    """What each step takes besides."""
    (folder / "pause.new").write_text(str(pause_s))
    (folder / "pause.new").replace(folder / "pause")


def options(folder: Path, workers: Any) -> dict[str, Any]:
    """What both trainers get."""
    return {
        "train_loop_config": {"folder": str(folder)},
        "scaling_config": ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        "run_config": ray.train.RunConfig(
            storage_path=str(folder / "runs"), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic checkpoints", "the script's own checkpoints"])
def test_it_ends_with_the_weights_that_ray_train_gives(
    automatic: bool, ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    monkeypatch.setattr(script, "__module__", "__main__")  # by value: Ray's own workers cannot import this file
    set_pause(theirs, 0.0)
    ray.train.torch.TorchTrainer(script, **options(theirs, 2)).fit()
    set_pause(ours, 3.0)  # a busy machine may take a minute to start a worker
    elastic = er.ElasticConfig(automatic_checkpoints=automatic, checkpoint_interval_s=1.0)
    handle = er.ElasticTrainer(script, elastic_config=elastic, **options(ours, (1, 2))).submit()
    handle.resize(1)
    wait_until(lambda: handle.status().workers == 1 and handle.status().epoch >= 1, handle, 150)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2, handle, 150)
    os.kill(handle.workers()[0].pid, signal.SIGKILL)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle, 120)
    wait_until(lambda: handle.status().workers == 2, handle, 150)
    set_pause(ours, 0.3)
    wait_until(lambda: handle.status().epoch >= 4, handle, 150)
    for worker in handle.workers():
        os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: EventKind.RESTART in kinds(handle), handle, 120)
    wait_until(lambda: handle.status().workers >= 1, handle, 150)
    set_pause(ours, 0.0)
    result = handle.result(timeout=250)
    assert result.metrics is not None and result.metrics["epoch"] == EPOCHS - 1
    expected, found = (torch.load(folder / "weights.pt") for folder in (theirs, ours))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=5e-5)
