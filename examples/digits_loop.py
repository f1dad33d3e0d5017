"""One train function on scikit-learn's handwritten digits. It runs unchanged

alone:               python examples/digits_loop.py
under torchrun:      torchrun --nproc-per-node 2 examples/digits_loop.py
as an elastic job:   see examples/digits.py

``--smoke`` trains one epoch.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.nn import Conv2d, Flatten, Linear, ReLU, Sequential, Unflatten
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

import elastic_ray as er

CONFIG = {"net": "mlp", "optimizer": "sgd", "lr": 0.2, "epochs": 1 if "--smoke" in sys.argv[1:] else 10}


def train(config: dict[str, Any]) -> float:
    """Train a small net; returns its accuracy on the held-out digits."""
    torch.manual_seed(0)
    training, held_out = split(config["images"], config["labels"])
    model = net(config["net"])
    if config["optimizer"] == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(training, batch_size=32)
    loader.autoscale_batch_size(max_batch_size=256, local_bsz_bounds=(4, 128))
    evaluation = er.AdaptiveDataLoader(held_out, batch_size=120, shuffle=False)

    accuracy = 0.0
    for _epoch in er.remaining_epochs_until(config["epochs"]):
        totals = er.Accumulator()
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            totals["loss"] += loss.item() * len(labels)
            totals["samples"] += len(labels)
            stand_in_for_a_larger_net(config, len(labels))
        model.eval()
        with torch.no_grad():
            for images, labels in evaluation:
                totals["right"] += (model(images).argmax(1) == labels).sum().item()
                totals["tested"] += len(labels)
        accuracy = totals["right"] / totals["tested"]
        er.report({"loss": totals["loss"] / totals["samples"], "accuracy": accuracy})
    return accuracy


def digits() -> dict[str, Any]:
    """The 1797 digits for the config: 8 x 8 grey values from 0 to 16, and labels.

    Loaded once, where the job is submitted: 130 kB travel faster than every worker imports scikit-learn.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return {"images": images.astype("uint8"), "labels": labels.astype("uint8")}


def split(images: Any, labels: Any) -> tuple[Subset[Any], Subset[Any]]:
    """1437 digits to train on, 360 held out."""
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64))
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(dataset, order[360:]), Subset(dataset, order[:360])


def net(name: str) -> torch.nn.Module:
    """A small net for 8 x 8 images."""
    if name == "mlp":
        return Sequential(Linear(64, 128), ReLU(), Linear(128, 10))
    return Sequential(
        Unflatten(1, (1, 8, 8)),
        Conv2d(1, 16, 3, padding=1),
        ReLU(),
        Conv2d(16, 32, 3, stride=2, padding=1),
        ReLU(),
        Flatten(),
        Linear(32 * 16, 10),
    )


def stand_in_for_a_larger_net(config: dict[str, Any], samples: int) -> None:
    """Wait as long as an accelerator would compute: a constant per micro-step and some time per sample.

    Eight such workers run side by side on two cores; a net that kept them busy would have them take turns.
    """
    if "step_s" in config:
        time.sleep(config["step_s"] + config["sample_s"] * samples)


if __name__ == "__main__":
    accuracy = train({**CONFIG, **digits()})
    if er.get_context().get_world_rank() == 0:
        print(f"accuracy {accuracy:.3f} on the held-out digits, {er.get_context().get_global_step()} steps")
