"""Real runs prove themselves: through a lost worker and a lost controller, and with a joiner that spoils its state."""

from __future__ import annotations

import collections
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
from click.testing import CliRunner

import elastic_ray as er
from elastic_ray.cli.app import cli
from elastic_ray.events import EventKind
from tests.job.controllers import kill_controller
from tests.job.jobs import kinds, start, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8), pytest.mark.timeout(600), pytest.mark.thorough]


def verified(path: str) -> list[dict[str, Any]]:
    answer = CliRunner().invoke(cli, ["verify", path, "--json"])
    found: list[dict[str, Any]] = json.loads(answer.output)
    assert answer.exit_code == 0, found
    return found


def test_a_run_through_losses_is_proven(ray_cluster: Any, tmp_path: Path) -> None:
    handle = start(tmp_path, workers=3, epochs=30)
    wait_until(lambda: handle.status().workers == 3 and handle.status().step > 10, handle)
    os.kill(handle.workers()[1].pid, signal.SIGKILL)
    wait_until(lambda: EventKind.FAILURE in kinds(handle), handle)
    kill_controller(handle)
    wait_until(lambda: EventKind.RECOVERED in kinds(handle), handle)
    result = handle.result(timeout=180)
    assert EventKind.PASS not in kinds(handle), "they are for the run's file"
    found = verified(result.path)
    epochs = [each for each in found if each["what"] == "epoch"]
    assert [each["proven"] for each in epochs] == [True] * 30
    assert "epoch 29: 192 of 192 samples, each once" in epochs[-1]["text"]
    groups = [each["proven"] for each in found if each["what"] == "group"]
    assert len(groups) >= 2 and all(groups)


class Spoilt(collections.defaultdict[Any, Any]):
    """An optimizer's state that keeps something else than it is given, in the first process that is given any."""

    def __init__(self, marker: str) -> None:
        super().__init__(dict)
        self.marker = marker

    def __setitem__(self, param: Any, state: Any) -> None:
        if state.get("momentum_buffer") is not None and not os.path.exists(self.marker):
            Path(self.marker).touch()
            state["momentum_buffer"].add_(1.0)
        super().__setitem__(param, state)


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    optimizer.state = Spoilt(config["marker"])
    model: Any = er.AdaptiveDataParallel(net, optimizer)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.randn(64, 3)), batch_size=8)
    for _ in er.remaining_epochs_until(100_000):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def test_a_spoilt_joiner_is_replaced(ray_cluster: Any, tmp_path: Path) -> None:
    handle = er.ElasticTrainer(
        train,
        train_loop_config={"marker": str(tmp_path / "spoilt")},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 3)),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path / "runs")),
    ).submit()
    handle.resize(1)
    wait_until(lambda: handle.status().step > 10, handle)
    handle.resize(2)
    wait_until(lambda: handle.status().workers == 2 and EventKind.RESIZE in kinds(handle), handle)
    assert (tmp_path / "spoilt").exists()
    told = [event for event in handle.events() if event.kind is EventKind.CANCELLED]
    assert any("does not hold the state that it was sent" in event.reason for event in told), told
    assert any("optimizer/0/0/momentum_buffer" in event.reason for event in told)
    step = handle.status().step
    wait_until(lambda: handle.status().step > step + 5, handle)
    handle.stop()
    handle.result(timeout=180)
