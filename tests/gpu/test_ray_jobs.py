"""Real jobs whose workers share one GPU, on a Ray cluster: half a GPU each, in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.events import EventKind
from tests.gpu.trained import BATCH, CLOSE, STRATEGIES, data, wrapped_net
from tests.job.jobs import kinds, wait_until

pytestmark = [pytest.mark.ray_cluster(num_cpus=8, num_gpus=1), pytest.mark.timeout(300)]

EPOCHS = 3
ROUGH = 0.1  # half precision, and a step less
WAIT_S = 60.0
PAUSE_S = 3.0  # in each step, until all has happened that is to happen: on a GPU a worker takes 12 s to start
CHOICES = (*STRATEGIES, "compiled", "scaled")


def train(config: dict[str, Any]) -> None:
    """Ends with its weights in a file; waits in each step until what is to happen has happened."""
    device = torch.device(config["device"])
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=1000, enabled=config["scaled"])
    options = {"grad_scaler": scaler, "nonfinite": "ignore"} if config["scaled"] else {}
    model, optimizer, wrapped = wrapped_net(config["strategy"], device, **options)
    forward = torch.compile(wrapped) if config["compiled"] else wrapped
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    context = er.get_context()
    for epoch in er.remaining_epochs_until(EPOCHS):
        for x, y in er.AdaptiveDataLoader(data(), batch_size=BATCH, seed=3):
            optimizer.zero_grad()
            with torch.autocast(device.type, half, enabled=config["scaled"]):
                loss = nn.functional.cross_entropy(forward(x.to(device)), y.to(device))
            if config["scaled"] and context.get_world_rank() == 1 and scaler.get_scale() == 256.0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            if config["until"] and not Path(config["until"]).exists():
                time.sleep(PAUSE_S)  # steps last until the change is made
        found = {"cuda": torch.cuda.is_available(), "scale": scaler.get_scale()}
        er.report({"epoch": epoch, **{name: float(value) for name, value in found.items()}})
    weights = model.state_dict()
    if context.get_world_rank() == 0:
        torch.save({name: value.cpu() for name, value in weights.items()}, config["weights"])


def start(
    folder: Path, device: torch.device, choice: str, *, workers: tuple[int, int], until: str = "", **options: Any
) -> er.JobHandle:
    return er.ElasticTrainer(
        train,
        train_loop_config={
            "device": device.type,
            "strategy": choice if choice in STRATEGIES else "replicated",
            "compiled": choice == "compiled",
            "scaled": choice == "scaled",
            "until": until,
            "weights": str(folder / f"{choice}-{device.type}.pt"),
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}
        ),
        run_config=ray.train.RunConfig(
            name=f"{choice}-{device.type}",
            storage_path=str(folder / "runs"),
            failure_config=ray.train.FailureConfig(max_failures=2),
        ),
        elastic_config=er.ElasticConfig(heartbeat_timeout_s=10.0, checkpoint_interval_s=0.1, **options),
    ).submit()


def wait_for(handle: er.JobHandle, workers: int, without: int = 0) -> None:
    def there() -> bool:
        members = handle.workers()
        return len(members) == workers and all(each.pid != without for each in members)

    wait_until(there, handle, WAIT_S)


@pytest.fixture(scope="module")
def undisturbed(shared_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of one worker on the CPU, to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    start(folder, torch.device("cpu"), "replicated", workers=(1, 1)).result(timeout=WAIT_S)
    return dict(torch.load(folder / "replicated-cpu.pt"))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_worker_comes_and_another_is_killed(
    ray_cluster: Any,
    device: torch.device,
    undisturbed: dict[str, torch.Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    choice: str,
) -> None:
    until = tmp_path / "all has happened"
    handle = start(tmp_path, device, choice, workers=(1, 2), until=str(until))
    handle.resize(1)
    wait_for(handle, 1)
    handle.resize(2)
    wait_for(handle, 2)
    victim = handle.workers()[-1]
    os.kill(victim.pid, signal.SIGKILL)
    wait_for(handle, 2, without=victim.pid)
    until.touch()
    result = handle.result(timeout=WAIT_S)
    assert result.metrics is not None and result.metrics["cuda"] == float(device.type == "cuda")
    assert result.metrics["scale"] == (128.0 if choice == "scaled" else 1.0), "one step overflowed on one, all skip it"
    weights = torch.load(tmp_path / f"{choice}-{device.type}.pt")
    for name, value in undisturbed.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=ROUGH if choice == "scaled" else CLOSE)
    with capsys.disabled():
        for event in handle.events():
            if event.pause_s:
                parts = ", ".join(f"{k} {v:.3f}" for k, v in event.detail.items() if k.endswith("_s"))
                print(f"\n{choice}: {event.kind.value} {event.from_workers} -> {event.to_workers}: {parts}", end="")


@pytest.mark.parametrize("choice", ["replicated", "fully_shard"])
def test_all_workers_killed_continue_from_what_was_saved(
    ray_cluster: Any, device: torch.device, undisturbed: dict[str, torch.Tensor], tmp_path: Path, choice: str
) -> None:
    until = tmp_path / "all has happened"
    handle = start(tmp_path, device, choice, workers=(2, 2), until=str(until))
    storage = RunStorage(str(tmp_path / "runs" / handle.job))
    wait_until(lambda: handle.status().step >= 3 and bool(state_files(storage)), handle, WAIT_S)
    for each in handle.workers():
        os.kill(each.pid, signal.SIGKILL)
    until.touch()
    handle.result(timeout=WAIT_S)
    assert EventKind.RESUMED in kinds(handle)
    weights = torch.load(tmp_path / f"{choice}-{device.type}.pt")
    for name, value in undisturbed.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=CLOSE)
