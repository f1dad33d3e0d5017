"""When Lightning's training ends, and what it leaves: as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.loop.changing import Change, run_job

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402

from elastic_ray.integrations.lightning import ElasticRayStrategy  # noqa: E402
from elastic_ray.run.current import set_session  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Stop(lightning.Callback):  # type: ignore[name-defined]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= self.step:
            trainer.should_stop = True


class Fail(Stop):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= self.step:
            raise ZeroDivisionError("the user's own mistake")


class Model(lightning.LightningModule):  # type: ignore[name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, _: int) -> Any:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(elastic: bool, callbacks: list[Any], **options: Any) -> Any:
    """Five steps an epoch."""
    trainer = lightning.Trainer(
        strategy=ElasticRayStrategy() if elastic else "auto",
        accelerator="cpu",
        devices=1,
        max_epochs=9,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=any(isinstance(each, OnExceptionCheckpoint) for each in callbacks),
        enable_progress_bar=False,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(20, 2)), batch_size=4))
    return trainer


ENDS: list[dict[str, Any]] = [
    {"min_steps": 12},
    {"min_steps": 2},
    {"min_epochs": 3},
    {"min_epochs": 2, "min_steps": 13},
    {"min_steps": 12, "max_steps": 11},
    {},
]


@pytest.mark.parametrize("options", ENDS, ids=str)
def test_a_training_told_to_stop_ends_where_lightning_does(options: dict[str, Any]) -> None:
    set_session(None)
    theirs = fit(False, [Stop(3)], **options)
    ours = fit(True, [Stop(3)], **options)
    assert (ours.global_step, ours.current_epoch) == (theirs.global_step, theirs.current_epoch)


def test_so_it_does_in_a_group_that_changes() -> None:
    changed = run_job(lambda: fit(True, [Stop(3)], min_steps=12).global_step, (Change(7, (1, 2)),), first=(1,))
    assert set(changed.results.values()) == {fit(False, [Stop(3)], min_steps=12).global_step}


@pytest.mark.parametrize("elastic", [False, True])
def test_a_training_that_fails_leaves_its_checkpoint(elastic: bool, tmp_path: Path) -> None:
    set_session(None)
    with pytest.raises(ZeroDivisionError):
        fit(elastic, [OnExceptionCheckpoint(str(tmp_path)), Fail(7)])
    state = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert state["global_step"] == 7 and set(state["state_dict"]) == {"layer.weight", "layer.bias"}


class Scheduled(Model):
    """Writes down the learning rate and the first sample of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[float, int]] = []
        self.first_epoch = 5

    def on_train_batch_start(self, batch: Any, number: int) -> int | None:
        return -1 if self.current_epoch == 0 and number == self.first_epoch else None

    def training_step(self, batch: Any, _: int) -> Any:
        self.steps.append((self.optimizers().param_groups[0]["lr"], int(batch[1][0])))
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Shorten(lightning.Callback):  # type: ignore[name-defined]
    """Has the first epoch end after three batches, and saves at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.first_epoch = 3

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def go_on(
    elastic: bool,
    folder: Path,
    ckpt_path: Path | None = None,
    *,
    also: tuple[Any, ...] = (),
    batch_size: int = 4,
    **options: Any,
) -> tuple[Any, Any]:
    """Five steps an epoch, of which ``options`` may use less; each step and each epoch's end leaves a checkpoint."""
    set_session(None)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = lightning.Trainer(
        strategy=ElasticRayStrategy() if elastic else "auto",
        accelerator="cpu",
        devices=1,
        callbacks=[saves, *also],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"max_epochs": 3, **options},
    )
    module = Scheduled()
    rows = TensorDataset(torch.ones(20, 2), torch.arange(20))
    trainer.fit(module, DataLoader(rows, batch_size=batch_size), ckpt_path=ckpt_path)
    return trainer, module


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 4}], ids=str)
@pytest.mark.parametrize(("saved", "read"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_goes_on_under_either_strategy(
    saved: bool, read: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    _, whole = go_on(saved, tmp_path, **options)
    for step in (2, options.get("limit_train_batches", 5), 7):
        trainer, rest = go_on(read, tmp_path / "again", tmp_path / f"step={step}.ckpt", **options)
        rates = [rate for rate, _ in whole.steps[step:]]
        assert [rate for rate, _ in rest.steps] == rates
        if read:  # Lightning counts batches, but begins at the first sample again
            assert rest.steps == whole.steps[step:]
        assert trainer.global_step == len(whole.steps)


@pytest.mark.parametrize("saved", [True, False])
def test_more_steps_continue_within_an_epoch_cut_short(saved: bool, tmp_path: Path) -> None:
    _, whole = go_on(False, tmp_path, max_steps=9)
    go_on(saved, tmp_path / "few", max_steps=7)
    trainer, rest = go_on(True, tmp_path / "again", tmp_path / "few" / "step=7.ckpt", max_steps=9)
    assert (rest.steps, trainer.global_step) == (whole.steps[7:], 9)


def test_an_epoch_that_a_callback_has_ended_stays_ended(tmp_path: Path) -> None:
    saved = tmp_path / "epoch.ckpt"
    _, whole = go_on(True, tmp_path, also=(Shorten(saved),), max_steps=9)
    _, rest = go_on(True, tmp_path / "again", saved, max_steps=9)
    assert (len(whole.steps), rest.steps) == (9, whole.steps[3:])


def test_epochs_too_few_for_max_steps_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, _ = go_on(True, tmp_path, also=(Shorten(tmp_path / "epoch.ckpt"),), max_steps=9, max_epochs=-1)
    assert trainer.global_step == 8
    assert "the training ended after 8 of max_steps=9: on_train_batch_start() has ended epochs" in caplog.text


@pytest.mark.parametrize(("batch_size", "first"), [(8, 16), (12, 0)])
def test_checkpoint_of_another_strategy_continues_with_a_larger_batch(
    batch_size: int, first: int, tmp_path: Path
) -> None:
    go_on(False, tmp_path)
    trainer, rest = go_on(True, tmp_path / "again", tmp_path / "step=2.ckpt", batch_size=batch_size)
    assert (rest.steps[0][1], trainer.current_epoch) == (first, 3)


def test_alone_a_fit_follows_one_that_has_failed() -> None:
    set_session(None)
    trainer = fit(True, [], max_steps=1)
    loader = DataLoader(TensorDataset(torch.ones(20, 2)), batch_size=4)
    trainer.callbacks.append(Fail(3))
    trainer.fit_loop.epoch_loop.max_steps = 8
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Model(), loader)
    trainer.callbacks.pop()
    module = Model()
    trainer.fit(module, loader)
    assert trainer.global_step == 8
