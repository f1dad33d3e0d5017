"""Lightning's Trainer as an elastic job: the same training as on one device, however the group changes."""

from __future__ import annotations

import collections
import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import elastic_ray as er
from tests.loop.changing import Change, Kill, run_job

pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")

from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
)

from elastic_ray.integrations.lightning import ElasticRayStrategy
from tests.integrations.lightning_fits import (
    BATCH,
    EPOCHS,
    MODULES,
    QUIET,
    SAMPLES,
    STEPS,
    L,
    Module,
    Result,
    check_alike,
    dataset,
    fit,
    job,
    torchmetrics,
)

GROWS = (Change(3, (1, 2, 3)), Change(STEPS + 3, (1, 2)))
LOSES = (Kill(2, 2, "backward"), Kill(STEPS, 3, "edge"))

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def uses() -> collections.Counter[int]:
    """How many samples were used how often in their epoch."""
    used = collections.Counter((epoch, each) for module in MODULES for epoch, batch in module.used for each in batch)
    assert len(used) == SAMPLES * EPOCHS
    return collections.Counter(used.values())


@pytest.mark.parametrize(
    ("script", "first"), [(GROWS, (1,)), ([Kill(2, 1, "after_step"), Kill(STEPS + 2, 2, "edge", joins=(3, 4))], (1, 2))]
)
def test_averaged_weights_reach_joiners_and_take_each_step_once(script: Any, first: Any) -> None:
    options: Any = {"callbacks": lambda: [EMAWeightAveraging(decay=0.8)]}
    alone = fit(False, **options)
    results, _ = job(script, first, **options)
    check_alike(results, alone)  # the weights are the average in the end
    assert not all(torch.equal(value, fit(False).weights[name]) for name, value in alone.weights.items())


class LogsRarely(Module):
    """Logs a metric in one step of an epoch only, and a value in the first epoch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step % STEPS == 1:
            self.rare.update(float(len(batch[0])))
            self.log("rare", self.rare, on_step=False, on_epoch=True)
        if self.global_step == 2:
            self.log("first", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


def test_what_joiners_have_not_logged_is_averaged_with_them() -> None:
    # One joins after the step that logs; one in an epoch after that in which "first" was logged.
    script = (Change(3, (1, 2)), Change(STEPS + 1, (1, 2, 3)))
    results, _ = job(script, (1,), make=LogsRarely)
    for result in results.values():
        assert result.metrics["rare"] == BATCH
    check_alike(results, fit(False, make=LogsRarely))


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize(("script", "first"), [((), (1,)), ((), (1, 2)), (GROWS, (1,)), (LOSES, (1, 2, 3))])
def test_training_is_that_of_one_device(interval: str, script: Any, first: Any) -> None:
    alone = fit(False, lambda: Module(interval))
    results, outcome = job(script, first, make=lambda: Module(interval))
    check_alike(results, alone)
    assert len(outcome.groups) == 1 + len(script)
    if script != LOSES:
        assert uses() == {1: SAMPLES * EPOCHS}
    kinds = [told for told in results[1].told if told[0] == "val"]
    assert kinds == [("val", epoch, STEPS * (epoch + 1), float(SAMPLES)) for epoch in range(EPOCHS)]


def test_what_is_logged_is_of_all_workers_samples() -> None:
    alone = fit(False)
    for script, first in (((), (1, 2)), ((Change(2, (1, 2)), Change(2 * STEPS + 2, (1, 2, 3))), (1,))):
        results, _ = job(script, first)
        for result in results.values():
            assert math.isclose(result.metrics["loss_epoch"], alone.metrics["loss_epoch"], rel_tol=1e-4)
        assert [each for each in results[1].told if each[0] == "train"] == [
            ("train", epoch, STEPS * (epoch + 1), float(SAMPLES)) for epoch in range(EPOCHS)
        ]


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer_step", "after_step", "edge"])
@pytest.mark.parametrize("step", [1, STEPS - 1, STEPS])
def test_a_lost_worker_costs_no_step_and_no_count(moment: str, step: int) -> None:
    alone = fit(False)
    results, outcome = job([Kill(step, 2, moment, joins=(3,))], (1, 2))
    check_alike(results, alone)
    assert outcome.groups == [(1, 2), (1, 3)] and set(results) == {1, 3}


class Counts(Callback):
    """Counts batches and epochs, as a callback with a state of its own."""

    def __init__(self) -> None:
        self.batches = self.epochs = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def on_train_epoch_end(self, *args: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.epochs = state["batches"], state["epochs"]


@pytest.mark.parametrize(
    ("script", "first"),
    [(GROWS, (1,)), ([Kill(2, 2, "backward")], (1, 2)), ([Kill(STEPS, 2, "backward", joins=(3,))], (1, 2))],
)
def test_callbacks_count_once_and_reach_joiners(script: Any, first: Any) -> None:
    results, _ = job(script, first, callbacks=lambda: [Counts()])
    for result in results.values():
        counts = next(each for each in result.callbacks if isinstance(each, Counts))
        assert (counts.batches, counts.epochs) == (STEPS * EPOCHS, EPOCHS)


def test_joiner_after_last_step_knows_epoch_and_metrics() -> None:
    alone = fit(False)
    results, _ = job([Change(STEPS * EPOCHS - 1, (1, 2))], (1,))
    check_alike(results, alone)
    assert results[2].metrics.keys() == alone.metrics.keys() and results[2].metrics["val"] == results[1].metrics["val"]


def test_checkpoint_put_off_until_validation_reaches_joiners(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [ModelCheckpoint(tmp_path, monitor="val", every_n_train_steps=STEPS // 2, filename="{step}")]

    # the first validation is after the step at whose end worker 3 joins
    script = [Kill(2 * STEPS - 1, 2, "edge", joins=(3,))]
    results, _ = job(script, (1, 2), callbacks=callbacks, check_val_every_n_epoch=2, enable_checkpointing=True)
    assert set(results) == {1, 3} and (tmp_path / f"step={2 * STEPS}.ckpt").exists()


class SavesMore(Module):
    """Has a state that only Lightning's checkpoints have."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["temperature"] = 1.0


def test_what_only_checkpoints_hold_is_warned_of() -> None:
    _, outcome = job([Change(2, (1, 2))], (1,), make=SavesMore)
    (warning,) = (text for kind, text, _ in outcome.told if kind == "warning")
    assert "on_save_checkpoint() saves does not reach workers that join" in warning


def test_one_checkpoint_at_time_and_any_trainer_reads_it(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [ModelCheckpoint(tmp_path, monitor="val", save_top_k=2, filename="{epoch}-{step}"), Counts()]

    results, _ = job(GROWS, (1,), callbacks=callbacks, enable_checkpointing=True)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 2, files
    keepers = [next(c for c in r.callbacks if isinstance(c, ModelCheckpoint)) for r in results.values()]
    assert len({each.best_model_path for each in keepers}) == 1
    assert Path(keepers[0].best_model_path).name in files
    saved = torch.load(keepers[0].best_model_path, weights_only=False)
    plain = Module()
    plain.load_state_dict(saved["state_dict"])
    assert saved["callbacks"] and saved["optimizer_states"]


@pytest.mark.parametrize("by", ["epochs", "steps"])
def test_going_on_from_a_checkpoint(tmp_path: Path, by: str) -> None:
    """As Lightning's users do it, ``fit(ckpt_path=)``: at the epoch and the batch where it stands."""
    every = {"every_n_epochs": 1} if by == "epochs" else {"every_n_train_steps": STEPS + 2}
    alone = fit(False)

    def callbacks() -> list[Any]:
        return [ModelCheckpoint(tmp_path, save_top_k=-1, **every)]

    job((), (1, 2), callbacks=callbacks, enable_checkpointing=True)
    first = min(tmp_path.iterdir(), key=lambda path: torch.load(path, weights_only=False)["global_step"])

    def go_on() -> Result:
        module = Module()
        MODULES.append(module)
        trainer = L.Trainer(
            strategy=ElasticRayStrategy(),
            use_distributed_sampler=False,
            max_epochs=EPOCHS,
            enable_checkpointing=False,
            **QUIET,
        )
        data = dataset()
        trainer.fit(module, DataLoader(data, BATCH), DataLoader(data, 16), ckpt_path=first)
        return Result(module, trainer)

    MODULES.clear()
    outcome = run_job(go_on, [Change(STEPS + 4, (1, 2))], first=(1,))
    check_alike(outcome.results, alone)
    used = collections.Counter(each for module in MODULES for epoch, batch in module.used for each in batch)
    begun = STEPS if by == "epochs" else STEPS + 2
    assert sum(used.values()) == (EPOCHS * STEPS - begun) * BATCH


def test_early_stopping_stops_all() -> None:
    results, _ = job((), (1, 2), callbacks=lambda: [EarlyStopping("val", patience=1, min_delta=10.0)], max_epochs=9)
    assert {(result.epochs, result.steps) for result in results.values()} == {(2, 2 * STEPS)}


@pytest.mark.parametrize(("limits", "steps"), [({"max_steps": 8}, 8), ({"limit_train_batches": 4}, 12)])
def test_limits_of_lightning(limits: dict[str, Any], steps: int) -> None:
    alone = fit(False, **limits)
    results, _ = job([Change(2, (1, 2))], (1,), **limits)
    assert alone.steps == steps
    check_alike(results, alone)


def test_validation_within_an_epoch_sees_the_same_buffers() -> None:
    results, _ = job([Change(2, (1, 2))], (1,), make=lambda: Module(norm=True), val_check_interval=0.5)
    assert [told[2] for told in results[1].told if told[0] == "val"] == [3, 6, 9, 12, 15, 18]
    assert results[1].metrics["val"] == results[2].metrics["val"]


def test_clipping_and_accumulation() -> None:
    """Micro-batches are ours; gradients are clipped once they are whole, and counted once."""
    alone = fit(False, gradient_clip_val=0.1)
    options = {"gradient_clip_val": 0.1}
    results, _ = job(GROWS, (1,), **options)
    check_alike(results, alone)
    wanted = {"max_batch_size": BATCH, "local_bsz_bounds": (1, 4), "gradient_accumulation": True}
    results, _ = job((), (1,), strategy=wanted, **options)
    (result,) = results.values()
    assert result.steps == STEPS * EPOCHS and result.batches == 2 * STEPS * EPOCHS
    for name, value in alone.weights.items():
        torch.testing.assert_close(result.weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("script", "first"), [((), (1,)), (GROWS, (1,))])
def test_accumulated_batches_are_cut_by_the_job(script: Any, first: Any) -> None:
    options = {"accumulate_grad_batches": 2, "loader": lambda: DataLoader(dataset(), BATCH // 2)}
    alone = fit(False, **options)
    results, _ = job(script, first, **options)
    for result in results.values():
        assert result.steps == alone.steps == STEPS * EPOCHS
        for name, value in alone.weights.items():
            torch.testing.assert_close(result.weights[name], value, rtol=1e-4, atol=1e-5)
    assert max(len(batch) for module in MODULES for _, batch in module.used) == BATCH // 2
    with pytest.raises(ValueError, match="multiply batch_size"):
        fit(True, accumulate_grad_batches=2, loader=lambda: er.AdaptiveDataLoader(dataset(), BATCH))


def test_what_is_logged_is_jobs_and_bars_are_not() -> None:
    results, outcome = job((), (1, 2), log_every_n_steps=3, max_epochs=2, enable_progress_bar=True)
    reports = list(outcome.reports.values())
    assert len(reports) == 2 * (STEPS // 3 + 1), "each third step, and each epoch's end"
    assert reports[-1] == pytest.approx(results[1].metrics)
    assert {"loss", "loss_step", "loss_epoch", "val"} <= set(reports[-1])
    bars = [each for each in results[1].callbacks if isinstance(each, ProgressBar)]
    assert bars and all(bar.is_disabled for bar in bars)


def test_adaptive_loader_of_users_own_has_the_strategys_limits() -> None:
    wanted = {"max_batch_size": 2 * BATCH, "policy": er.adaptation.BatchSchedule({0: 2 * BATCH})}
    results, _ = job((), (1,), loader=lambda: er.AdaptiveDataLoader(dataset(), BATCH), strategy=wanted)
    assert results[1].steps == EPOCHS * STEPS // 2 + 1, "the first step is of the initial batch"


class Estimating(Module):
    """Asks for the length of the training when its optimizer is made, as warm-up schedules do."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == STEPS * self.trainer.max_epochs
        return super().configure_optimizers()


def test_alone_an_adaptive_loader_serves_a_second_fit() -> None:
    strategy = ElasticRayStrategy(max_batch_size=2 * BATCH)
    options = {"enable_checkpointing": False, "use_distributed_sampler": False, **QUIET, "strategy": strategy}
    trainer = L.Trainer(max_epochs=1, **options)
    module, loader = Estimating(), er.AdaptiveDataLoader(dataset(), BATCH)
    for epochs in (1, 3):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, loader, DataLoader(dataset(), BATCH))
        assert trainer.current_epoch == epochs


class Manual(Module):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.used.append((self.current_epoch, batch[2].tolist()))
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


def test_manual_optimisation() -> None:
    alone = fit(False, Manual)
    for script, first in ((GROWS, (1,)), ([Kill(3, 2, "backward")], (1, 2))):
        results, _ = job(script, first, make=Manual)
        check_alike(results, alone)


class Several(Manual):
    """A GAN's way: one optimizer steps before the other's loss is computed."""

    def configure_optimizers(self) -> Any:
        first, *rest = self.net.parameters()
        optimizers = torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.Adam(rest, lr=0.01)
        return [*optimizers], [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.used.append((self.current_epoch, batch[2].tolist()))
        for optimizer in self.optimizers():
            for each in self.optimizers():
                each.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()


def test_several_optimizers() -> None:
    alone = fit(False, Several)
    for script, first in ((GROWS, (1,)), ([Kill(3, 2, "backward")], (1, 2))):
        results, _ = job(script, first, make=Several)
        check_alike(results, alone)


class Stream(IterableDataset):
    """Without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(dataset())


@pytest.mark.parametrize("made", [DataLoader, er.AdaptiveDataLoader])
def test_lightning_may_seed_the_processes_of_loaders(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")  # as seed_everything(workers=True) does
    assert fit(True, loader=lambda: made(dataset(), batch_size=BATCH), max_epochs=1).steps == STEPS


def test_a_stream_without_a_length() -> None:
    alone = fit(False, loader=lambda: DataLoader(Stream(), BATCH))
    results, _ = job([Change(3, (1, 2))], (1,), loader=lambda: DataLoader(Stream(), BATCH))
    check_alike(results, alone)
    assert uses() == {1: SAMPLES * EPOCHS}


def test_bfloat16() -> None:
    alone = fit(False, precision="bf16-mixed")
    results, _ = job((), (1, 2), precision="bf16-mixed")
    for name, value in alone.weights.items():
        torch.testing.assert_close(results[1].weights[name], value, rtol=0.1, atol=0.05)


class Lbfgs(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"callbacks": lambda: [GradientAccumulationScheduler({0: 2})]}, "gradient_accumulation=True"),
        ({"reload_dataloaders_every_n_epochs": 1}, "on_train_epoch_start"),
        ({"sync_batchnorm": True}, "use GroupNorm or LayerNorm"),
        ({"callbacks": lambda: [StochasticWeightAveraging(0.1)]}, "EMAWeightAveraging works"),
        ({"devices": 2}, "devices must be 1"),
        ({"num_nodes": 2}, "num_nodes must be 1"),
        ({"make": Lbfgs}, "needs one gradient a step"),
        ({"max_epochs": -1}, "max_epochs=-1"),
        ({"strategy": {"gradient_accumulation": True}}, "max_batch_size"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=says):
        fit(True, **options)


def test_of_several_loaders_it_is_said() -> None:
    def loaders() -> list[Any]:
        return [DataLoader(dataset(), BATCH), DataLoader(dataset(), BATCH)]

    with pytest.raises(ValueError, match="one loader over a dataset that gives an item of each"):
        fit(True, loader=loaders)


def test_batches_that_no_loader_cuts_are_refused() -> None:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return iter(DataLoader(dataset(), BATCH))

        def __len__(self) -> int:
            return STEPS

    with pytest.raises(TypeError, match="put what it reads into a dataset"):
        fit(True, loader=Batches)


def test_loader_given_in_a_dict_would_come_without_it() -> None:
    with pytest.raises(ValueError, match="or one within a dict"):
        fit(True, loader=lambda: {"a": DataLoader(dataset(), BATCH)})


def test_second_fit_continues_alone_and_is_refused_in_job() -> None:
    def twice(elastic: bool) -> tuple[int, int]:
        strategy = {"strategy": ElasticRayStrategy()} if elastic else {}
        trainer = L.Trainer(
            max_epochs=1, enable_checkpointing=False, use_distributed_sampler=False, **QUIET, **strategy
        )
        module = Module()
        for epochs in (1, 3):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, DataLoader(dataset(), BATCH), DataLoader(dataset(), BATCH))
        return trainer.global_step, trainer.current_epoch

    assert twice(True) == twice(False) == (3 * STEPS, 3)
    with pytest.raises(ValueError, match="train all epochs in one fit"):
        run_job(lambda: twice(True), (), first=(1,))


def test_alone_without_a_job() -> None:
    """In a notebook: the same code trains on one worker."""
    alone, elastic = fit(False), fit(True)
    check_alike({1: elastic}, alone)
    assert er.get_context().get_world_size() == 1
