"""Adaptation policies: control loops inside a job, which ask for a batch, for workers, and for an end.

    python examples/adaptation.py              (about a minute on two cores)
    python examples/adaptation.py --smoke      (some seconds: few steps)

The script prints each request of a policy, and what became of it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in workers

import ray
import ray.train
import torch
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.adaptation import (
    EarlyStop,
    NoiseScaleBatch,
    Policy,
    PolicyView,
    Report,
    Request,
    SetBatch,
    ThroughputScaling,
)

SMOKE = "--smoke" in sys.argv[1:]
EPOCHS = 4 if SMOKE else 60


class WarmUp(Policy):
    """A policy of one's own: a small batch for the first steps, and a report when it is over."""

    def __init__(self, steps: int, batch_size: int) -> None:
        self.steps, self.batch_size = steps, batch_size

    def before_train(self, view: PolicyView) -> Request:
        """Begin with the small batch."""
        return SetBatch(self.batch_size)

    def after_step(self, view: PolicyView) -> list[Request] | None:
        """Give the choice back."""
        if view.step != self.steps:
            return None
        return [SetBatch(None), Report({"samples": view.samples, "seconds": round(view.elapsed_s, 2)})]


def train(config: dict[str, Any]) -> None:
    """A little regression; the pause stands in for a larger net, which two workers share well and four do not."""
    torch.manual_seed(0)
    inputs = torch.randn(2048, 16, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2048, 1, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True) + noise)
    model: Any = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(dataset, batch_size=64)
    loader.autoscale_batch_size(max_batch_size=512)
    for _epoch in er.remaining_epochs_until(config["epochs"]):
        totals = er.Accumulator()
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            totals["loss"] += loss.item() * len(x)
            time.sleep(0.005 + 0.0003 * len(x))
        er.report({"loss": totals["loss"] / len(dataset)})


def main() -> None:
    """Run one job, and print what its policies have asked for."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    policies = [
        WarmUp(steps=5 if SMOKE else 20, batch_size=32),
        NoiseScaleBatch(every=10, min_batch_size=32),
        ThroughputScaling(every=20, stride=1, steps_to_stay=20, threshold=0.5),
        EarlyStop("loss", patience=5, min_delta=0.001),
    ]
    handle = er.ElasticTrainer(
        train,
        train_loop_config={"epochs": EPOCHS},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 3), resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name="adaptation", storage_path=tempfile.mkdtemp()),
        adaptation=policies,
    ).submit()
    result = handle.result()
    granted = refused = 0
    for event in handle.events():
        if event.kind is er.events.EventKind.POLICY and "request" in event.detail:
            is_refused = bool(event.detail["refused"])
            granted, refused = granted + (not is_refused), refused + is_refused
            print(f"{'refused' if is_refused else 'asked':<8} {event.reason}")
        elif event.kind in (er.events.EventKind.RESIZE, er.events.EventKind.BATCH, er.events.EventKind.POLICY):
            print(f"{event.kind.value:<8} {event.from_workers} -> {event.to_workers} workers: {event.reason}")
    loss = (result.metrics or {})["loss"]
    print(f"{granted} requests applied, {refused} refused; loss {loss:.3f} after {handle.status().epoch} epochs")
    ray.shutdown()


if __name__ == "__main__":
    main()
