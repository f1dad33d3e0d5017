"""What transformers and Lightning promise of their trainers, case by case: ours does the same as theirs.

Neither ships its tests in a wheel. These are the main cases of their suites, told again by the behaviour that their
docs promise: each trains with theirs and with ours, on the same data, and compares all that a user can see.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elastic_ray.run.current import set_session

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer  # noqa: E402

from elastic_ray.integrations.huggingface import Trainer  # noqa: E402
from elastic_ray.integrations.lightning import ElasticRayStrategy  # noqa: E402

SAMPLES, BATCH = 40, 4

pytestmark = [pytest.mark.foreign, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def numbers() -> TensorDataset:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def plain(values: Any) -> Any:
    """Numbers as they are compared: to five places; what tells of time is left out."""
    if isinstance(values, dict):
        timed = ("runtime", "_per_second", "total_flos", "_time")
        return {key: plain(value) for key, value in values.items() if not str(key).endswith(timed)}
    if isinstance(values, torch.Tensor):
        return [round(float(each), 5) for each in values.detach().flatten()]
    return round(float(values), 5) if isinstance(values, float) else values


# --- transformers


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        return ({"x": x, "labels": y} for x, y in numbers())  # type: ignore[attr-defined]


class Nan(Classifier):
    """Its loss is NaN in the third step."""

    calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        self.calls += self.training
        if self.training and self.calls == 3:
            found["loss"] = found["loss"] * math.nan
        return found


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def by_sum(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return loss / (num_items_in_batch if num_items_in_batch is not None else len(labels))


def own_optimizer(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step))}


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "an optimizer and a scheduler of one's own": {"extra": own_optimizer},
    "an optimizer's class and arguments": {
        "extra": lambda model: {"optimizer_cls_and_kwargs": (torch.optim.Adamax, {"lr": 0.01})}
    },
    "adafactor": {"optim": "adafactor"},
    "adamw with weight decay and betas": {"optim": "adamw_torch", "weight_decay": 0.1, "adam_beta1": 0.5},
    "cosine with restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "a constant rate that warms up": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4},
    "polynomial": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
    "a plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1e3},
        "eval_strategy": "epoch",
        "metric_for_best_model": "loss",
    },
    "a model that is made anew": {"model_init": True},
    "bfloat16": {"bf16": True},
    "metrics": {"eval_strategy": "epoch", "extra": lambda model: {"compute_metrics": accuracy}},
    "several sets for evaluation": {"eval_strategy": "epoch", "several": True},
    "the best model at the end": {
        "eval_strategy": "steps",
        "eval_steps": 7,
        "save_strategy": "steps",
        "save_steps": 7,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    },
    "saves the best": {
        "eval_strategy": "epoch",
        "save_strategy": "best",
        "metric_for_best_model": "accuracy",
        "extra": lambda model: {"compute_metrics": accuracy},
    },
    "saves the model alone": {"save_strategy": "epoch", "save_only_model": True, "save_total_limit": 1},
    "a loss of one's own": {"extra": lambda model: {"compute_loss_func": by_sum}},
    "a stream": {"data": Stream, "max_steps": 17},
    "a stream with a short last batch": {"data": Stream, "max_steps": 9, "per_device_train_batch_size": 7},
    "a fraction of an epoch": {"num_train_epochs": 0.4},
    "no step": {"max_steps": 1},
    "a batch larger than the data": {"per_device_train_batch_size": 64},
    "a loss that is not a number": {"model": Nan, "logging_steps": 2},
    "logs everything": {"logging_steps": 1, "logging_nan_inf_filter": False},
    "no clipping": {"max_grad_norm": 0.0},
    "evaluates in parts": {"eval_strategy": "epoch", "eval_accumulation_steps": 1, "per_device_eval_batch_size": 3},
    "only the loss of an evaluation": {"eval_strategy": "epoch", "prediction_loss_only": True},
    "metrics by batches": {"eval_strategy": "epoch", "batch_eval_metrics": True, "by_batches": True},
    "memory": {"skip_memory_metrics": True, "torch_empty_cache_steps": 2},
    "worker processes": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
}


def in_batches() -> Any:
    seen: list[float] = []

    def compute(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append(float(prediction.predictions.float().mean()))
        return {"mean": sum(seen) / len(seen)} if compute_result else {}

    return compute


def transformers_run(kind: Any, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    set_session(None)
    given = dict(case)
    model = given.pop("model", Classifier)()
    rows = [{"x": x, "labels": y} for x, y in numbers()]  # type: ignore[attr-defined]
    data = given.pop("data", lambda: rows)()
    made = {"model": model, **given.pop("extra", lambda model: {})(model)}
    if given.pop("model_init", False):
        made = {"model_init": Classifier}
    if given.pop("by_batches", False):
        made["compute_metrics"] = in_batches()
    sets: Any = {"a": rows[:8], "b": rows[8:20]} if given.pop("several", False) else rows[:12]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        train_sampling_strategy="sequential",
        **{
            "num_train_epochs": 2,
            "optim": "sgd",
            "learning_rate": 0.05,
            "save_strategy": "no",
            "per_device_train_batch_size": BATCH,
            "logging_steps": 5,
            **given,
        },
    )
    trainer = kind(args=arguments, train_dataset=data, eval_dataset=sets, **made)
    trainer.remove_callback(transformers.PrinterCallback)
    output = trainer.train()
    predicted = trainer.predict(rows[:10])
    return {
        "log": [plain(each) for each in trainer.state.log_history],
        "ended": (output.global_step, plain(output.training_loss), trainer.state.best_global_step),
        "weights": [plain(p) for p in trainer.model.parameters()],
        "predicted": plain(torch.as_tensor(predicted.predictions).float()) if predicted.predictions is not None else 0,
        "evaluated": plain(trainer.evaluate()),
        "files": sorted(
            each.relative_to(folder).as_posix()
            for each in folder.rglob("*")
            if each.name not in ("elastic_ray_position.json", "training_args.bin")
        ),
    }


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_transformers(case: str, tmp_path: Path) -> None:
    records = []
    for name, kind in (("theirs", transformers.Trainer), ("ours", Trainer)):
        (tmp_path / name).mkdir()
        records.append(transformers_run(kind, tmp_path / name, TRANSFORMERS[case]))
    theirs, ours = records
    assert str(ours).replace("/ours/", "/theirs/") == str(theirs)


# --- Lightning


class Module(lightning.LightningModule):  # type: ignore[name-defined]
    def __init__(self, rate: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        self.outputs: list[Any] = []

    def loss(self, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"test": self.loss(batch), "twice": 2 * self.loss(batch)})

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate, momentum=0.9)


class Plateau(Module):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


class Cosine(Module):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss


class Frozen(Module):
    def configure_optimizers(self) -> Any:
        self.net[0].requires_grad_(False)
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Data(lightning.LightningDataModule):  # type: ignore[name-defined]
    def setup(self, stage: str) -> None:
        self.numbers = numbers()

    def train_dataloader(self) -> Any:
        return DataLoader(self.numbers, BATCH)

    def val_dataloader(self) -> Any:
        return [DataLoader(self.numbers, 8), DataLoader(self.numbers, 5)]


LIGHTNING: dict[str, dict[str, Any]] = {
    "plain": {},
    "a plateau": {"module": Plateau},
    "a schedule over all steps": {"module": Cosine, "monitor": True},
    "manual optimisation": {"module": Manual},
    "a frozen part": {"module": Frozen},
    "a datamodule with two sets for validation": {"data": Data},
    "bfloat16": {"precision": "bf16-mixed"},
    "64 bits": {"precision": "64-true"},
    "the best two checkpoints": {
        "callbacks": lambda folder: [ModelCheckpoint(folder, "{epoch}-{step}", "val", save_top_k=2, mode="max")]
    },
    "checkpoints by steps, and the last": {
        "callbacks": lambda folder: [ModelCheckpoint(folder, every_n_train_steps=7, save_last=True, save_top_k=-1)]
    },
    "weights alone": {"callbacks": lambda folder: [ModelCheckpoint(folder, save_weights_only=True)]},
    "stops early": {"max_epochs": 6, "callbacks": lambda folder: [EarlyStopping("val", 1e3, patience=2)]},
    "rates are monitored": {"module": Cosine, "monitor": True},
    "a time that is long enough": {"callbacks": lambda folder: [Timer("00:01:00:00")], "max_time": None},
    "min_steps beyond max_epochs": {"min_steps": 25},
    "max_steps within an epoch": {"max_steps": 13},
    "no batches": {"limit_train_batches": 0},
    "one batch": {"limit_train_batches": 1, "limit_val_batches": 1, "limit_test_batches": 1},
    "three epochs, validated each third": {"max_epochs": 3, "check_val_every_n_epoch": 3},
    "validates by quarters": {"val_check_interval": 0.25},
    "barebones": {"barebones": True},
}


def lightning_run(elastic: bool, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    from lightning.pytorch.loggers import CSVLogger

    set_session(None)
    given = dict(case)
    module = given.pop("module", Module)()
    data = given.pop("data", None)
    callbacks = given.pop("callbacks", lambda folder: [])(folder / "kept")
    if given.pop("monitor", False):
        callbacks.append(LearningRateMonitor("step"))
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    quiet: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": saves, "logger": CSVLogger(folder, "log")}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 2}
    if given.get("barebones"):
        quiet = {}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        use_distributed_sampler=False,
        strategy=ElasticRayStrategy() if elastic else "auto",
        default_root_dir=folder,
        **{"max_epochs": 2, **quiet, **given},
    )
    loader = DataLoader(numbers(), BATCH)
    if data is None:
        trainer.fit(module, loader, DataLoader(numbers(), 8))
    else:
        trainer.fit(module, datamodule=data())
    record = {
        "ended": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        "metrics": plain(trainer.callback_metrics),
        "weights": [plain(p) for p in module.parameters()],
        "validated": plain(trainer.validate(module, DataLoader(numbers(), 7), verbose=False)[:1]),
        "tested": [plain(each) for each in trainer.test(module, DataLoader(numbers(), 7), verbose=False)],
        "predicted": plain(torch.cat(trainer.predict(module, DataLoader(numbers(), 7)) or [torch.zeros(1)])),
        "files": sorted(each.name for each in folder.rglob("*.ckpt")),
        "logged": [each.read_text() for each in sorted(folder.rglob("metrics.csv"))],
    }
    for each in sorted(folder.rglob("*.ckpt")):
        again = type(module).load_from_checkpoint(each) if type(module) is Module else None
        record[each.name] = [plain(p) for p in again.parameters()] if again is not None else None
    return record


@pytest.mark.parametrize("case", LIGHTNING)
def test_lightning(case: str, tmp_path: Path) -> None:
    records = []
    for name, elastic in (("theirs", False), ("ours", True)):
        (tmp_path / name).mkdir()
        records.append(lightning_run(elastic, tmp_path / name, LIGHTNING[case]))
    theirs, ours = records
    assert ours == theirs
