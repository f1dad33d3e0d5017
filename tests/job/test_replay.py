"""A part of a run is trained again on another number of workers, and gives the same model within rounding."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch

import elastic_ray as er
from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.driver.replay import Window
from tests.job.jobs import wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(600), pytest.mark.slow]


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model: Any = er.AdaptiveDataParallel(net, optimizer)
    inputs = torch.randn(96, 3)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1).sin()), batch_size=24)
    for _ in er.remaining_epochs_until(100_000):
        for x, y in loader:
            time.sleep(0.02)  # a step takes some time
            optimizer.zero_grad()
            (config["scale"] * (model(x).squeeze(1) - y).square().mean()).backward()
            optimizer.step()


def test_a_window_replays_within_rounding(ray_cluster: Any, tmp_path: Path) -> None:
    handle = er.ElasticTrainer(
        train,
        train_loop_config={"scale": 1.0},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        elastic_config=er.ElasticConfig(checkpoint_interval_s=0.5),
        run_config=ray.train.RunConfig(name="digits", storage_path=str(tmp_path)),
    ).submit()
    storage = RunStorage(handle.storage_path)
    wait_until(lambda: len(state_files(storage)) >= 2, handle)
    behind = state_files(storage)[0].steps + 10
    wait_until(lambda: handle.status().step >= behind, handle)
    handle.stop()
    handle.result(timeout=180)
    last = state_files(storage)[0]
    found = er.replay(
        train, handle.storage_path, step=last.steps, workers=3, train_loop_config={"scale": 1.0}, timeout_s=90
    )
    assert found.equal and max(found.differences.values()) < 1e-4, str(found)
    window = Window.around(handle.storage_path, last.steps)
    assert str(found).startswith(f"{window.steps}, trained again, gave the same model") and window.after == last
    assert not list(tmp_path.glob("digits-*")), "nothing is left of it"
    again = er.replay(
        train, handle.storage_path, step=last.steps, workers=1, train_loop_config={"scale": 2.0}, timeout_s=90
    )
    assert not again.equal, "another loss gives another model"


def test_a_step_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    RunStorage(str(tmp_path / "digits")).create()
    with pytest.raises(ValueError, match=r"must have an automatic checkpoint at or after it, but .* at steps: none"):
        Window.around(str(tmp_path / "digits"), 3)
