"""A LightningModule on scikit-learn's digits as an elastic job: it grows and loses a worker within `trainer.fit`.

Lines that differ from a script for one device are marked. Needs `pip install -e ".[examples,lightning]"`; takes half a
minute on two cores:

    python examples/lightning_digits.py
    python examples/lightning_digits.py --smoke     few epochs, and no kill
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import lightning
import torch
import torchmetrics
import watched_job
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from elastic_ray.integrations.lightning import ElasticRayStrategy  # changed


class Digits(lightning.LightningModule):
    """Classifies images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self.right = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.used = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss; every worker gets its share of a batch."""
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        self.used.update(float(len(labels)))
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_start(self) -> None:
        """Count this epoch's samples from 0."""
        self.used.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Every worker sees all of the held-out digits."""
        images, labels = batch
        self.right(self.net(images), labels)
        self.log("accuracy", self.right)

    def on_train_epoch_end(self) -> None:
        """Tell the job."""
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        er.report({**metrics, "step": self.global_step, "samples": float(self.used.compute())})  # changed

    def configure_optimizers(self) -> Any:
        """SGD with a rate that falls to 0 over the run."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(config: dict[str, Any]) -> None:
    """The train function: what a script for one device would do."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    training, held_out = torch.utils.data.random_split(data, [1437, 360])
    trainer = lightning.Trainer(
        max_epochs=config["epochs"],
        strategy=ElasticRayStrategy(),  # changed
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(training, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=120))


def check(metrics: dict[str, Any], smoke: bool) -> bool:
    """Whether the last epoch was good."""
    return bool(metrics["accuracy"] > (0.5 if smoke else 0.93))


if __name__ == "__main__":
    sys.exit(watched_job.main(__doc__, "lightning", train, lambda smoke: {"epochs": 3 if smoke else 60}, check))
