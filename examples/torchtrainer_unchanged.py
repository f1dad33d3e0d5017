"""A script for Ray Train's TorchTrainer as an elastic job: one line is another, the import of the trainer.

The job grows to three workers and loses one of them while it trains. Needs `pip install -e ".[examples]"`; takes a
minute on two cores:

    python examples/torchtrainer_unchanged.py
    python examples/torchtrainer_unchanged.py --smoke     few epochs, and no kill
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import ray.train
import ray.train.torch
import torch
import watched_job
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from elastic_ray import ElasticTrainer as TorchTrainer  # changed, from: from ray.train.torch import TorchTrainer


def train_loop(config: dict[str, Any]) -> None:
    """Train a small network, and continue from the latest checkpoint where there is one."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    training, held_out = TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])
    train_loader: Any = ray.train.torch.prepare_data_loader(DataLoader(training, batch_size=16, shuffle=True))
    test_loader = ray.train.torch.prepare_data_loader(DataLoader(held_out, batch_size=120))
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    model: Any = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config["epochs"])
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1
    for epoch in range(first, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        right = seen = 0
        with torch.no_grad():
            for x, y in test_loader:
                right += int((model(x).argmax(1) == y).sum())
                seen += len(y)
        metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": right / seen}
        with tempfile.TemporaryDirectory() as folder:
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            }
            if ray.train.get_context().get_world_rank() == 0:
                torch.save(state, os.path.join(folder, "state.pt"))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def make_trainer(folder: str, smoke: bool) -> TorchTrainer:
    """The trainer, as the script has made it all along."""
    return TorchTrainer(
        train_loop,
        train_loop_config={"epochs": 4 if smoke else 100},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 3)),
        run_config=ray.train.RunConfig(
            name="unchanged", storage_path=folder, checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2)
        ),
    )


def check(metrics: dict[str, Any], smoke: bool) -> bool:
    """Return True if the last epoch was good; rank 0 looks at its share of the held-out digits, as in Ray Train."""
    return bool(metrics["accuracy"] > (0.5 if smoke else 0.9))


if __name__ == "__main__":
    sys.exit(watched_job.run(__doc__, "unchanged", make_trainer, check))
