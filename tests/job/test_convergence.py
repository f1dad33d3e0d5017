"""Digits, trained while the job is resized at random, end where a run of fixed size ends."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import ray.train

import elastic_ray as er
from elastic_ray.events import EventKind
from tests.job.jobs import kinds, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray_cluster(num_cpus=4), pytest.mark.timeout(1000)]

EPOCHS = 20
BATCH = 48  # 30 steps an epoch, the last one smaller
CHANGES = 8


def train(config: dict[str, Any]) -> None:
    """Train an MLP; the file ``config["pause"]`` says how long each step takes besides."""
    import torch
    from sklearn.datasets import load_digits
    from torch.nn.functional import cross_entropy

    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, held_out = order[360:], order[:360]
    torch.manual_seed(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parallel = er.AdaptiveDataParallel(model, optimizer)
    dataset = torch.utils.data.TensorDataset(images[training], labels[training])
    loader = er.AdaptiveDataLoader(dataset, batch_size=BATCH, seed=3)
    pause = Path(config["pause"])
    for epoch in er.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(parallel(x), y).backward()
            optimizer.step()
            time.sleep(float(pause.read_text()))  # as slow as the test asks
        with torch.no_grad():
            loss = cross_entropy(model(images[training]), labels[training]).item()
            accuracy = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean().item()
        er.report({"loss": loss, "accuracy": accuracy, "epoch": epoch, "steps": er.get_context().get_global_step()})


def start(folder: Path, *, workers: int | tuple[int, int], pause_s: float) -> tuple[er.JobHandle, Path]:
    """Submit the run; returns the file with its pause too."""
    folder.mkdir()
    pause = folder / "pause"
    pause.write_text(str(pause_s))
    trainer = er.ElasticTrainer(
        train,
        train_loop_config={"pause": str(pause)},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
    )
    return trainer.submit(), pause


def set_pause(pause: Path, pause_s: float) -> None:
    """Write it so that no step reads half of it."""
    written = pause.with_suffix(".new")
    written.write_text(str(pause_s))
    written.replace(pause)


def test_run_resized_at_random_ends_with_the_same_loss(ray_cluster: Any, tmp_path: Path) -> None:
    """Same seed, same global batch: only the order in which floats are summed may differ."""
    dice = random.Random(11)
    handle, pause = start(tmp_path / "resized", workers=(1, 4), pause_s=0.3)
    size = 0
    for _ in range(CHANGES):
        size = dice.choice([n for n in (1, 2, 3, 4) if n != size])
        set_pause(pause, 0.3)  # a worker that is started now joins within few steps
        handle.resize(size)
        wait_until(lambda size=size: handle.status().workers == size, handle, 90)
        set_pause(pause, 0.01)
        time.sleep(dice.uniform(0.1, 0.4))  # the next change comes at any moment
    set_pause(pause, 0.0)
    resized = handle.result(timeout=180).metrics
    sizes = [event.to_workers for event in handle.events() if event.kind is EventKind.RESIZE]
    assert len(sizes) >= CHANGES - 1, sizes
    assert EventKind.FAILURE not in kinds(handle)

    handle, _ = start(tmp_path / "fixed", workers=2, pause_s=0.0)
    fixed = handle.result(timeout=180).metrics
    assert EventKind.RESIZE not in kinds(handle)

    assert resized is not None
    assert fixed is not None
    print(f"sizes {sizes}: resized {resized}, fixed {fixed}")
    assert resized["epoch"] == fixed["epoch"] == EPOCHS - 1
    assert resized["steps"] == fixed["steps"] == EPOCHS * 30
    assert fixed["loss"] < 0.1, "it did not learn"
    assert resized["loss"] == pytest.approx(fixed["loss"], rel=0.02)
    assert resized["accuracy"] == pytest.approx(fixed["accuracy"], abs=0.01)
