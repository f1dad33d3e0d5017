"""Lightning's fits of a small regression, alone and as a job whose group changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.loop.changing import run_job

L = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

from elastic_ray.integrations.lightning import ElasticRayStrategy  # noqa: E402

SAMPLES, BATCH, EPOCHS = 48, 8, 3
STEPS = SAMPLES // BATCH
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def dataset() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))


class Module(L.LightningModule):  # type: ignore[name-defined]
    """A small regression that writes down what it uses."""

    def __init__(self, interval: str = "epoch", norm: bool = False) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
        self.norm = torch.nn.BatchNorm1d(4) if norm else torch.nn.Identity()
        self.interval = interval
        self.used: list[tuple[int, list[int]]] = []
        self.seen = torchmetrics.SumMetric()
        self.told: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(self.norm(batch[0])) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.used.append((self.current_epoch, batch[2].tolist()))
        loss = self.loss(batch)
        self.seen.update(float(len(batch[0])))
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.told.append(("train", self.current_epoch, self.global_step, float(self.seen.compute())))
        self.seen.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)
        self.log("count", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        numbers = self.trainer.callback_metrics
        if not self.trainer.sanity_checking:
            self.told.append(("val", self.current_epoch, self.global_step, float(numbers.get("count", -1))))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.interval == "epoch":
            schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        else:
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS * EPOCHS)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


class Result:
    """What a worker's run came to."""

    def __init__(self, module: Module, trainer: Any) -> None:
        self.weights = {name: each.detach().clone() for name, each in module.net.named_parameters()}
        self.steps, self.epochs, self.told = trainer.global_step, trainer.current_epoch, module.told
        self.rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        self.callbacks = trainer.callbacks
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit(elastic: bool, make: Callable[[], Module] = Module, loader: Any = None, **options: Any) -> Result:
    """Train as one would."""
    module = make()
    MODULES.append(module)
    wanted = options.pop("strategy", {})
    if elastic:
        options = {"devices": 1, **options, "strategy": ElasticRayStrategy(**wanted)}
    options = {"max_epochs": EPOCHS, "enable_checkpointing": False, **QUIET, **options}
    callbacks = options.pop("callbacks", list)()
    trainer = L.Trainer(**options, callbacks=callbacks)
    data = dataset()
    trainer.fit(module, loader() if loader else DataLoader(data, BATCH), DataLoader(data, 16))
    return Result(module, trainer)


MODULES: list[Module] = []


def job(script: Sequence[Any], first: Sequence[int], **options: Any) -> tuple[dict[int, Result], Any]:
    """The same as an elastic job; its results by worker."""
    MODULES.clear()
    outcome = run_job(lambda: fit(True, **options), script, first=first)
    return outcome.results, outcome


def check_alike(results: dict[int, Result], alone: Result) -> None:
    for result in results.values():
        for name, value in alone.weights.items():
            torch.testing.assert_close(result.weights[name], value, rtol=1e-4, atol=1e-5)
        assert (result.steps, result.epochs, result.batches) == (alone.steps, alone.epochs, alone.batches)
        assert math.isclose(result.rate, alone.rate, rel_tol=1e-6, abs_tol=1e-9)
