"""What Lightning and transformers call, and when, is the same under elastic-ray: both run, and their records agree."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 40, 4

pytestmark = pytest.mark.filterwarnings("ignore")


def numbers() -> TensorDataset:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


# --- Lightning

# Called once a process for its set-up, or by what a strategy is built of.
_OF_STRATEGIES = {"configure_sharded_model", "on_fit_start", "setup"}


def _noting(theirs: type, record: list[str], prefix: str) -> type:
    """A subclass whose hooks write down that they were called, and where the trainer stood."""

    def noted(name: str) -> Any:
        original = getattr(theirs, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = args[0] if prefix == "callback." else self._trainer
            loop = trainer.fit_loop
            place = f"{trainer.current_epoch} {trainer.global_step} {loop.epoch_loop.batch_progress.current.ready}"
            record.append(f"{prefix}{name} {place}")
            return original(self, *args, **kwargs)

        return call

    names = [
        name
        for name, each in inspect.getmembers(theirs, inspect.isfunction)
        if name.startswith(("on_", "setup", "teardown")) and name not in ("on_gpu", "on_save_checkpoint")
    ]
    return type("Noting" + theirs.__name__, (theirs,), {name: noted(name) for name in names})


def lightning_record(strategy: Any, folder: Path, case: str, options: dict[str, Any]) -> dict[str, Any]:
    """One run: hooks in their order, logged values, where it ended."""
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger

    record: list[str] = []
    seen: list[float] = []

    class Net(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(float(batch[0].sum()))
            loss = (self.layer(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            if case == "stops within an epoch" and batch_idx == 4:
                self.trainer.should_stop = True
            if case == "leaves batches out" and batch_idx % 3 == 1:
                return None
            return {"loss": loss, "also": 123}

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if case == "ends epochs early" and batch_idx == 3 else None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", (self.layer(batch[0]) - batch[1]).square().mean())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert case == "leaves batches out" or outputs["also"] == 123

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            interval = "step" if case == "steps its schedule" else "epoch"
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
            return [optimizer], [{"scheduler": schedule, "interval": interval}]

        def train_dataloader(self) -> Any:
            return DataLoader(numbers(), BATCH)

        def val_dataloader(self) -> Any:
            return DataLoader(numbers(), BATCH)

    callbacks = [_noting(lightning.Callback, record, "callback.")()]
    if case == "stops when it gets no better":
        callbacks.append(EarlyStopping("val_loss", min_delta=1e3, patience=1))
    lightning.seed_everything(5, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        log_every_n_steps=2,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
        **({"logger": CSVLogger(folder), "max_epochs": 3, "limit_val_batches": 2, **options}),
        **({} if strategy is None else {"strategy": strategy}),
    )
    net = _noting(Net, record, "module.")()
    trainer.fit(net)
    trainer.validate(net, verbose=False)
    return {
        "hooks": [each for each in record if each.split(".")[1].split()[0] not in _OF_STRATEGIES],
        "seen": [round(each, 4) for each in seen],
        "metrics": {name: round(float(value), 5) for name, value in trainer.callback_metrics.items()},
        "ended": (trainer.current_epoch, trainer.global_step, trainer.fit_loop.batch_idx, trainer.should_stop),
        "lr": [round(each, 8) for each in trainer.lr_scheduler_configs[0].scheduler.get_last_lr()],
        "checkpoints": sorted(each.name for each in folder.rglob("*.ckpt")),
        "weights": [round(float(each), 5) for p in net.parameters() for each in p.detach().flatten()],
        "logged": [each.read_text().splitlines()[0] for each in folder.rglob("metrics.csv")],
    }


LIGHTNING: dict[str, dict[str, Any]] = {
    "plain": {},
    "limits": {"limit_train_batches": 4, "limit_val_batches": 1},
    "a share of the data": {"limit_train_batches": 0.5},
    "max_steps": {"max_steps": 17, "max_epochs": -1},
    "validates within an epoch": {"val_check_interval": 0.3},
    "validates in each second epoch": {"check_val_every_n_epoch": 2},
    "no validation": {"limit_val_batches": 0},
    "no sanity check": {"num_sanity_val_steps": 0},
    "stops within an epoch": {},
    "stops, but not before min_epochs": {"min_epochs": 2},
    "ends epochs early": {},
    "leaves batches out": {},
    "steps its schedule": {},
    "stops when it gets no better": {"max_epochs": 10},
    "clips": {"gradient_clip_val": 0.1},
    "clips values": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "overfits": {"overfit_batches": 3},
    "validates across epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
    "checks all first": {"num_sanity_val_steps": -1},
    "in 64 bits": {"precision": "64-true", "deterministic": True, "inference_mode": False, "detect_anomaly": True},
    "fast_dev_run": {"fast_dev_run": 2, "logger": False},
}


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("case", LIGHTNING)
def test_lightning(case: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from elastic_ray.integrations.lightning import ElasticRayStrategy

    records = []
    for name, strategy in (("theirs", None), ("ours", ElasticRayStrategy())):
        (tmp_path / name).mkdir()
        records.append(lightning_record(strategy, tmp_path / name, case, LIGHTNING[case]))
    theirs, ours = records
    assert ours == theirs


# --- transformers


def transformers_record(kind: type, folder: Path, case: str, options: dict[str, Any]) -> dict[str, Any]:
    """One run: events in their order with the flags that callbacks see, the log, and where it ended."""
    import transformers

    record: list[tuple[Any, ...]] = []

    def noted(name: str) -> Any:
        def call(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            flags = [flag for flag, value in vars(control).items() if value is True]
            record.append((name, state.global_step, round(state.epoch or 0, 4), state.max_steps, *flags))
            if case == "stops within an epoch" and name == "on_step_end" and state.global_step == 7:
                control.should_training_stop = True
            if case == "ends epochs early" and name == "on_step_end" and state.global_step % 4 == 3:
                control.should_epoch_stop = True
            if case == "asks for all" and name == "on_step_end" and state.global_step == 5:
                control.should_log = control.should_evaluate = control.should_save = True

        return call

    events = [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]
    noting = type("Noting", (transformers.TrainerCallback,), {name: noted(name) for name in events})()
    callbacks = [noting]
    if case == "stops when it gets no better":
        callbacks.append(transformers.EarlyStoppingCallback(1, 1e3))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(3, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            found = self.layer(x)
            return {"loss": (found - labels).square().mean(), "logits": found}

    rows = [{"x": x, "labels": y} for x, y in numbers()]  # type: ignore[attr-defined]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=0.01,
        train_sampling_strategy="sequential",
        **{"num_train_epochs": 3, "save_strategy": "no", "per_device_train_batch_size": BATCH, **options},
    )
    model = Net()
    trainer = kind(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:12], callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    output = trainer.train()
    of_time = ("runtime", "_per_second", "total_flos")
    history = [
        {name: round(value, 4) for name, value in each.items() if not name.endswith(of_time)}
        for each in trainer.state.log_history
    ]
    return {
        "events": record,
        "log": history,
        "ended": (output.global_step, round(output.training_loss, 4), trainer.state.best_global_step),
        "weights": [round(float(each), 5) for p in model.parameters() for each in p.detach().flatten()],
        "checkpoints": sorted(each.name for each in folder.glob("checkpoint-*")),
    }


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logs": {"logging_steps": 3, "logging_first_step": True},
    "saves by steps": {"save_strategy": "steps", "save_steps": 7, "save_total_limit": 2},
    "saves by epochs": {"save_strategy": "epoch"},
    "evaluates by steps": {"eval_strategy": "steps", "eval_steps": 4, "logging_steps": 5},
    "evaluates by epochs": {"eval_strategy": "epoch"},
    "evaluates later": {"eval_strategy": "steps", "eval_steps": 4, "eval_delay": 11, "eval_on_start": True},
    "max_steps": {"max_steps": 17},
    "part of an epoch": {"num_train_epochs": 1.5},
    "stops within an epoch": {"save_strategy": "steps", "save_steps": 3},
    "ends epochs early": {"logging_steps": 2},
    "asks for all": {},
    "warms up": {"warmup_steps": 5, "lr_scheduler_type": "cosine"},
    "clips": {"max_grad_norm": 0.1},
    "a shorter last batch": {"per_device_train_batch_size": 6, "logging_steps": 3},
    "drops the last": {"dataloader_drop_last": True, "per_device_train_batch_size": 3},
    "stops when it gets no better": {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "num_train_epochs": 6,
    },
}


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("case", TRANSFORMERS)
def test_transformers(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from elastic_ray.integrations.huggingface import Trainer

    records = []
    for name, kind in (("theirs", transformers.Trainer), ("ours", Trainer)):
        (tmp_path / name).mkdir()
        records.append(transformers_record(kind, tmp_path / name, case, TRANSFORMERS[case]))
    theirs, ours = records
    assert ours == theirs
