"""Cases of Lightning's tests: ``DDPStrategy`` beside ``ElasticRayStrategy``."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from elastic_ray.integrations.lightning import ElasticRayStrategy
from tests.foreign.two_ranks.common import BATCH, numbers, run, weights

warnings.filterwarnings("ignore")


class Module(lightning.LightningModule):
    interval, norm = "epoch", False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)
        if self.norm:
            self.between = torch.nn.BatchNorm1d(5)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.first(x)))

    def loss(self, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 if self.interval == "step" else 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class PerStep(Module):
    interval = "step"


class Normed(Module):
    norm = True


class Unused(Module):
    """A layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = torch.nn.Linear(2, 2)


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


class Gathering(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        found: Any = self.all_gather(batch[0].sum())
        self.log("gathered", found.sum())


class Noting(Callback):
    """The order of callbacks, and where the trainer was."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        for name in ("on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end"):
            self._note(name)
        for name in ("on_validation_epoch_end", "on_save_checkpoint", "on_before_optimizer_step", "on_fit_end"):
            self._note(name)

    def _note(self, name: str) -> None:
        def call(trainer: Any, *args: Any, **kwargs: Any) -> None:
            rates = [each["lr"] for each in trainer.optimizers[0].param_groups] if trainer.optimizers else []
            self.seen.append([name, trainer.global_step, trainer.current_epoch, *rates])

        setattr(self, name, call)


def loader(elastic: bool, samples: int = 40, steps: int = 1) -> Any:
    """Of theirs each rank takes its half of a batch; with its own sampler Lightning would deal the samples out."""
    data = numbers(samples)
    if elastic:
        return DataLoader(data, 2 * BATCH * steps)
    whole = [list(range(samples))[begin : begin + 2 * BATCH] for begin in range(0, samples, 2 * BATCH)]
    rank = int(os.environ["RANK"])
    return DataLoader(data, batch_sampler=[e[: len(e) // 2] if rank == 0 else e[len(e) // 2 :] for e in whole])


def fit(elastic: bool, folder: Path, given: dict[str, Any], resume: Any = None) -> dict[str, Any]:
    given = dict(given)
    module, samples = given.pop("module", Module)(), given.pop("samples", 40)
    noting = Noting()
    callbacks = [noting, *given.pop("callbacks", lambda folder: [])(folder)]
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    ours, theirs = given.pop("ours", {}), given.pop("theirs", {})
    strategy: Any
    strategy = ElasticRayStrategy(**ours) if elastic else DDPStrategy(process_group_backend="gloo", **theirs)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if elastic else 2,
        strategy=strategy,
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"max_epochs": 2, **given},
    )
    trainer.fit(module, loader(elastic, samples, 2 if ours else 1), DataLoader(numbers(), 8), ckpt_path=resume)
    metrics = dict(trainer.callback_metrics)
    trainer.strategy.barrier()
    return {
        "weights": weights(module),
        "seen": noting.seen,
        "ended": [trainer.global_step, trainer.current_epoch, trainer.should_stop],
        "metrics": metrics,
        "validated": trainer.validate(module, DataLoader(numbers(), 8), verbose=False),
        "files": sorted(each.name for each in folder.rglob("*.ckpt")),
    }


def trained(**given: Any) -> Any:
    return lambda elastic, folder: fit(elastic, folder, given)


def accumulated(elastic: bool, folder: Path) -> dict[str, Any]:
    """Two micro-batches a step of each process: theirs by count, ours by the largest that a worker takes."""
    given: dict[str, Any] = {"samples": 64, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    if elastic:
        given.pop("accumulate_grad_batches")
        given["ours"] = {"max_batch_size": 4 * BATCH, "local_bsz_bounds": (1, BATCH), "gradient_accumulation": True}
    found = fit(elastic, folder, given)
    return {name: found[name] for name in ("weights", "ended", "validated")}


def resumed(elastic: bool, folder: Path) -> dict[str, Any]:
    """From a checkpoint of theirs, and ours also from its own."""
    kept = {"callbacks": lambda folder: [ModelCheckpoint(folder, filename="first")]}
    first = fit(elastic, folder, kept)
    found: dict[str, Any] = {"first": first}
    for written in ("theirs", "ours"):
        path = folder.parent / (written if elastic else "theirs") / "first.ckpt"
        found[written] = fit(elastic, folder / written, {"max_epochs": 3}, str(path))
    return found


def read_by_the_other(elastic: bool, folder: Path) -> dict[str, Any]:
    """A file of theirs and one of ours are read alike, without a trainer."""
    fit(elastic, folder, {"callbacks": lambda folder: [ModelCheckpoint(folder, filename="first")]})
    read = torch.load(folder / "first.ckpt", weights_only=False)
    return {
        "weights": weights(Module.load_from_checkpoint(folder / "first.ckpt")),
        "keys": sorted(read),
        "optimizer": read["optimizer_states"],
        "schedule": read["lr_schedulers"][0]["last_epoch"],
    }


CASES: dict[str, Any] = {
    "plain": trained(),
    "clipping": trained(gradient_clip_val=0.1),
    "clipping by value": trained(gradient_clip_val=0.05, gradient_clip_algorithm="value"),
    "bfloat16": trained(precision="bf16-mixed"),
    "a schedule per step": trained(module=PerStep),
    "manual optimisation": trained(module=Manual),
    "gathered values": trained(module=Gathering),
    "a layer that no rank uses": trained(module=Unused, theirs={"find_unused_parameters": True}),
    "a short last batch": trained(samples=36),
    "early stopping": trained(max_epochs=6, callbacks=lambda folder: [EarlyStopping("val", 1e3, patience=2)]),
    "min_steps": trained(min_steps=13),
    "max_steps": trained(max_steps=8),
    "validates within an epoch": trained(val_check_interval=2),
    "limits": trained(limit_train_batches=3, limit_val_batches=2),
    "the best checkpoint": trained(
        callbacks=lambda folder: [ModelCheckpoint(folder, "{epoch}-{step}", "val", save_top_k=1, save_last=True)]
    ),
    "a checkpoint of either": read_by_the_other,
    "resumed": resumed,
    "accumulation by the loader": accumulated,
    "accumulation": trained(accumulate_grad_batches=2),
    "sync_batchnorm": trained(module=Normed, sync_batchnorm=True),
}

if __name__ == "__main__":
    run(CASES)
