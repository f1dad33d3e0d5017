"""When Lightning's training ends, and what it leaves: as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.loop.changing import Change, run_job

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import OnExceptionCheckpoint  # noqa: E402

from elastic_ray.integrations.lightning import ElasticRayStrategy  # noqa: E402
from elastic_ray.run.current import set_session  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Stop(lightning.Callback):  # type: ignore[misc, name-defined]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= self.step:
            trainer.should_stop = True


class Fail(Stop):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= self.step:
            raise ZeroDivisionError("the user's own mistake")


class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
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
def test_a_training_that_is_to_stop_ends_where_lightning_ends_it(options: dict[str, Any]) -> None:
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
