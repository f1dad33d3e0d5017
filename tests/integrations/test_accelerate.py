"""accelerate's Accelerator as an elastic job: the same training as in one process."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import logging
import math
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from elastic_ray.run.current import set_session
from tests.integrations.argument_tables import arguments
from tests.loop.changing import Change, Kill, run_job

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration  # noqa: E402

from elastic_ray.integrations.huggingface import Accelerator  # noqa: E402
from elastic_ray.integrations.huggingface.arguments import _OF_ACCELERATOR  # noqa: E402

SAMPLES, BATCH, EPOCHS = 48, 8, 3
STEPS = SAMPLES // BATCH
GROWS = (Change(3, (1, 2, 3)), Change(STEPS + 3, (1, 2)))
LOSES = (Kill(2, 2, "backward"), Kill(STEPS, 3, "edge"))
LARGER = er.adaptation.BatchSchedule({0: 4 * BATCH})

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_state_for_all")]


def numbers() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))


def pair() -> tuple[Any, Any]:
    """Model and optimizer."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer


def parts() -> tuple[Any, Any, Any]:
    """Model, optimizer, scheduler."""
    model, optimizer = pair()
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS * EPOCHS)


def loop(
    elastic: bool, folder: Path, used: Any = None, order: str = "", batch: int = BATCH, **options: Any
) -> dict[str, Any]:
    """A loop of Accelerate's documentation style; with ``order``, what it names is prepared call by call."""
    kind = Accelerator if elastic else accelerate.Accelerator
    accelerator = kind(cpu=True, **options)
    model, optimizer, scheduler = parts()
    loader: Any = DataLoader(numbers(), batch)
    check: Any = DataLoader(numbers(), 16)
    if order:
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "check": check}
        for name in order.split():
            named[name] = accelerator.prepare(named[name])
        model, optimizer, scheduler, loader, check = named.values()
    else:
        model, optimizer, loader, check, scheduler = accelerator.prepare(model, optimizer, loader, check, scheduler)
    assert not elastic or (loader.batch_size, check.batch_size) == (BATCH, 16)
    seen = []
    for epoch in er.remaining_epochs_until(EPOCHS) if elastic else range(EPOCHS):
        for x, y, index in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if used is not None:
                used.update((epoch, each) for each in index.tolist())
        with torch.no_grad():
            found = [accelerator.gather_for_metrics(index) for _, _, index in check]
        seen.append(sorted(torch.cat(found).tolist()))
        accelerator.wait_for_everyone()
    accelerator.save(accelerator.get_state_dict(model), folder / "model.pt")
    total = accelerator.reduce(torch.tensor(1.0))
    plain = accelerator.unwrap_model(model)
    return {
        "weights": {name: p.detach().clone() for name, p in plain.named_parameters()},
        "lr": scheduler.get_last_lr()[0],
        "seen": seen,
        "total": float(total),
        "main": accelerator.is_main_process,
    }


@pytest.mark.parametrize(("script", "first"), [((), (1, 2)), (GROWS, (1,)), (LOSES, (1, 2, 3))])
def test_a_loop_of_accelerate(script: Any, first: Any, tmp_path: Path) -> None:
    alone = loop(False, tmp_path)
    used: collections.Counter[tuple[int, int]] = collections.Counter()
    outcome = run_job(lambda: loop(True, tmp_path, used), script, first=first)
    for result in outcome.results.values():
        for name, value in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-5)
        assert math.isclose(result["lr"], alone["lr"], abs_tol=1e-9)
        assert result["total"] == len(outcome.groups[-1])
    assert [sorted(set(each)) for each in outcome.results[1]["seen"]] == [list(range(SAMPLES))] * EPOCHS
    if script != LOSES:
        assert outcome.results[1]["seen"] == [list(range(SAMPLES))] * EPOCHS
        assert set(used.values()) == {1} and len(used) == SAMPLES * EPOCHS
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(saved) == set(alone["weights"])


def test_loops_may_clear_gradients_first() -> None:
    def cleared_first(**options: Any) -> list[float]:
        accelerator = Accelerator(cpu=True, **options)
        model, optimizer, scheduler = parts()
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, DataLoader(numbers(), BATCH)
        )
        for _ in er.remaining_epochs_until(EPOCHS):
            for x, y, _ in loader:
                optimizer.zero_grad()
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()]).tolist()

    whole = cleared_first()
    set_session(None)
    cut = cleared_first(max_batch_size=BATCH, local_bsz_bounds=(1, 4), gradient_accumulation=True)
    assert cut == pytest.approx(whole, abs=1e-5)


def test_accelerate_accumulates_by_our_micro_batches(tmp_path: Path) -> None:
    alone = loop(False, tmp_path)
    wanted = {"max_batch_size": BATCH, "local_bsz_bounds": (1, 4), "gradient_accumulation": True}
    (result,) = run_job(lambda: loop(True, tmp_path, **wanted), ()).results.values()
    for name, value in alone["weights"].items():
        torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-5)
    assert math.isclose(result["lr"], alone["lr"], abs_tol=1e-9)


@pytest.mark.parametrize("script", [(), GROWS])
def test_accumulated_batches_are_one_batch_that_the_job_cuts(script: Any, tmp_path: Path) -> None:
    """As many updates of as many samples as without an accumulation, whatever the number of workers."""
    alone = loop(False, tmp_path)
    used: collections.Counter[tuple[int, int]] = collections.Counter()
    options = {"batch": BATCH // 2, "gradient_accumulation_steps": 2}
    for result in run_job(lambda: loop(True, tmp_path, used, **options), script, first=(1,)).results.values():
        for name, value in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-5)
        assert math.isclose(result["lr"], alone["lr"], abs_tol=1e-9)
    assert set(used.values()) == {1} and len(used) == SAMPLES * EPOCHS


def test_what_accelerate_cannot_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 or more, but got 0"):
        Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=0))
    with pytest.raises(ValueError, match="max_batch_size"):
        Accelerator(gradient_accumulation=True)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(NotImplementedError, match="after the last sample"):
        accelerator.skip_first_batches(DataLoader(numbers(), BATCH), 2)
    with pytest.raises(NotImplementedError, match="shuffle=False"):
        accelerator.split_between_processes([1, 2])
    with pytest.raises(ValueError, match="reduction must be"):
        accelerator.reduce(torch.ones(1), "min")


@pytest.mark.parametrize("order", ["loader model optimizer scheduler check", "scheduler check optimizer loader model"])
def test_what_belongs_together_is_prepared_in_several_calls(order: str, tmp_path: Path) -> None:
    alone = loop(False, tmp_path)
    outcome = run_job(lambda: loop(True, tmp_path, order=order), GROWS, first=(1,))
    for result in outcome.results.values():
        for name, value in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-5)
        assert math.isclose(result["lr"], alone["lr"], abs_tol=1e-9)


def test_optimizer_without_its_model_is_refused_when_training_begins() -> None:
    def train() -> None:
        accelerator = Accelerator(cpu=True)
        _model, optimizer = pair()
        optimizer, _ = accelerator.prepare(optimizer, DataLoader(numbers(), BATCH))
        next(iter(er.remaining_epochs_until(1)))

    with pytest.raises(ValueError, match="SGD was prepared, but the model"):
        run_job(train, ())


def _with_two_optimizers(elastic: bool) -> list[torch.Tensor]:
    accelerator: Any = (Accelerator if elastic else accelerate.Accelerator)(cpu=True)
    model, _ = pair()
    first, *rest = model.parameters()
    plain: list[torch.optim.Optimizer] = [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.Adam(rest)]
    schedulers = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.0, total_iters=STEPS * EPOCHS) for each in plain]
    loader = DataLoader(numbers(), BATCH, shuffle=False)
    model, loader, *prepared = accelerator.prepare(model, loader, *plain, *schedulers)
    for _ in er.remaining_epochs_until(EPOCHS) if elastic else range(EPOCHS):
        for x, y, _ in loader:
            for each in prepared[:2]:
                each.zero_grad()
            accelerator.backward((model(x) - y).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            for each in prepared:
                each.step()
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


def test_several_optimizers_of_one_model() -> None:
    alone = _with_two_optimizers(False)
    for result in run_job(lambda: _with_two_optimizers(True), GROWS, first=(1, 2)).results.values():
        for mine, theirs in zip(result, alone, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_parameter_has_one_optimizer() -> None:
    def train() -> None:
        accelerator = Accelerator(cpu=True)
        model, optimizer = pair()
        second = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.prepare(model, optimizer, second)
        next(iter(er.remaining_epochs_until(1)))

    with pytest.raises(ValueError, match="each parameter must be stepped by one optimizer"):
        run_job(train, ())


def test_prepared_model_has_its_own_and_its_wrappers_attributes() -> None:
    def train() -> None:
        accelerator = Accelerator(cpu=True)
        model, optimizer = pair()
        model.config = {"hidden": 6}
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(), BATCH))
        assert prepared.config is model.config and accelerator.unwrap_model(prepared) is model
        assert accelerator.prepare(prepared) is accelerator.prepare(model) is prepared
        with pytest.raises(AttributeError, match="nothing_such"):
            prepared.nothing_such  # noqa: B018
        for _ in er.remaining_epochs_until(1):
            for x, y, _ in loader:
                assert accelerator.gradient_state.active_dataloader is loader
                accelerator.backward((prepared(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.gradient_state.active_dataloader is None
        assert prepared.gain(2.0) >= 1.0
        evaluated = torch.nn.Linear(4, 1)
        assert accelerator.prepare(evaluated)(torch.ones(2, 4)).shape == (2, 1)

    run_job(train, ())


def test_a_saved_state_continues_and_fits_accelerate_s_own(tmp_path: Path) -> None:
    """Under automatic names ``load_state`` is given no folder."""
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    seen: list[tuple[int, int]] = []

    def train(*, resumed: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
        accelerator = Accelerator(cpu=True, project_config=config)
        model, optimizer, scheduler = parts()
        loader: Any = DataLoader(numbers(), BATCH)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        if resumed:
            accelerator.load_state()
        used = []
        for epoch in er.remaining_epochs_until(2):
            for batch, (x, y, index) in enumerate(loader):
                used += [epoch * SAMPLES + each for each in index.tolist()]
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if (epoch, batch) == (1, 2) and not resumed:
                    accelerator.save_state()
        return {name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()}, used

    ((whole, used),) = run_job(lambda: train(resumed=False), ()).results.values()
    for weights, rest in run_job(lambda: train(resumed=True), (), first=(1, 2)).results.values():
        for name, value in whole.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
        seen += rest
    assert sorted(seen) == used[SAMPLES + 3 * BATCH :]

    theirs = accelerate.Accelerator(cpu=True)
    model, optimizer, scheduler = parts()
    model, optimizer, scheduler = theirs.prepare(model, optimizer, scheduler)
    theirs.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert scheduler.scheduler.last_epoch == STEPS + 3


def test_state_that_is_loaded_within_training_leaves_the_place(tmp_path: Path) -> None:
    def train() -> int:
        accelerator = Accelerator(cpu=True)
        model, optimizer = pair()
        loader: Any = DataLoader(numbers(), BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        folder = accelerator.save_state(str(tmp_path / "state"))
        first, steps = {name: p.detach().clone() for name, p in model.named_parameters()}, 0
        for _ in er.remaining_epochs_until(2):
            for x, y, _ in loader:
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
            accelerator.load_state(folder)
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.detach(), first[name], rtol=0, atol=0)
        return steps

    assert list(run_job(train, ()).results.values()) == [2 * STEPS]


def test_main_process_work_runs_on_rank_0_trackers_included(tmp_path: Path) -> None:
    begun: list[int] = []

    class Tracker(accelerate.tracking.GeneralTracker):  # type: ignore[name-defined]
        name, requires_logging_directory = "noting", False

        def __init__(self) -> None:
            super().__init__()
            self.values: list[Any] = []

        @property
        def tracker(self) -> Any:
            return self

        def start(self) -> None:
            begun.append(er.get_context().get_world_rank())

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Any, step: int | None = None) -> None:
            self.values.append(values)

    def train() -> tuple[int, list[int], int]:
        tracker = Tracker()
        accelerator = Accelerator(cpu=True, log_with=tracker)
        model, optimizer = pair()
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(), BATCH))
        ran: list[int] = []
        for epoch in er.remaining_epochs_until(1):
            accelerator.init_trackers("run")
            accelerator.on_main_process(ran.append)(epoch)
            with accelerator.main_process_first():
                pass
            for x, y, _ in loader:
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({"epoch": epoch})
        return er.get_context().get_world_rank(), ran, len(tracker.values)

    results = run_job(train, (), first=(1, 2)).results.values()
    assert sorted(results) == [(0, [0], 1), (1, [], 0)] and begun == [0]


def test_plug_ins_are_refused_with_the_way_out() -> None:
    for options, says in (
        ({"kwargs_handlers": [accelerate.DistributedDataParallelKwargs()]}, "elastic_options="),
        ({"fsdp_plugin": object()}, "its shards cannot follow the group: leave it out"),
    ):
        with pytest.raises(ValueError, match=says):
            Accelerator(cpu=True, **options)


def test_scheduler_made_for_the_prepared_optimizer_is_prepared_later() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = pair()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(), BATCH))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    for _ in er.remaining_epochs_until(1):
        for x, y, _ in loader:
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.scheduler.last_epoch == STEPS


@pytest.mark.parametrize(("script", "first"), [((), (1, 2)), (GROWS, (1,)), (LOSES, (1, 2, 3))])
def test_beside_a_gradient_scaler_steps_are_ours(script: Any, first: Any, new_scaler: Any) -> None:
    """The scaler stands for fp16's, which accelerate makes on a GPU only."""

    def train(elastic: bool) -> tuple[dict[str, torch.Tensor], float, float]:
        accelerator = (Accelerator if elastic else accelerate.Accelerator)(cpu=True)
        accelerator.scaler = new_scaler()
        model, optimizer, scheduler = parts()
        loader: Any = DataLoader(numbers(), BATCH)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for epoch in er.remaining_epochs_until(EPOCHS) if elastic else range(EPOCHS):
            for x, y, index in loader:
                accelerator.backward((model(x) - y).square().mean())
                overflow = bool(accelerator.reduce((index == 0).sum())) and epoch == 1
                if overflow:
                    for p in model.parameters():
                        p.grad.fill_(math.inf)
                optimizer.step()
                assert accelerator.optimizer_step_was_skipped == overflow
                scheduler.step()
                optimizer.zero_grad()
        weights = {name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()}
        progress = model.scale_invariant_steps if elastic else EPOCHS * STEPS - 1
        return weights, scheduler.get_last_lr()[0], progress

    weights, rate, steps = train(False)
    for result in run_job(lambda: train(True), script, first=first).results.values():
        for name, value in weights.items():
            torch.testing.assert_close(result[0][name], value, rtol=1e-4, atol=1e-5)
        assert math.isclose(result[1], rate, abs_tol=1e-9) and result[2] == steps


@pytest.mark.parametrize(("clip", "limit"), [("clip_grad_norm_", 0.5), ("clip_grad_value_", 0.2)])
def test_accumulated_gradients_are_clipped_once_beside_a_scaler(clip: str, limit: float, new_scaler: Any) -> None:
    def train(**options: Any) -> dict[str, torch.Tensor]:
        accelerator = Accelerator(cpu=True, **options)
        accelerator.scaler = new_scaler()
        model, optimizer = pair()
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(), BATCH))
        # Behind prepare(), which would have the model compute in 16 bits.
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        try:
            for _ in er.remaining_epochs_until(EPOCHS):
                for x, y, _ in loader:
                    accelerator.backward((model(x) - y).square().mean())
                    getattr(accelerator, clip)(model.parameters(), limit)
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            accelerator.state._mixed_precision = "no"  # it is the process's
        return {name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()}

    wanted = {"max_batch_size": BATCH, "local_bsz_bounds": (1, 4), "gradient_accumulation": True}
    (whole,) = run_job(train, ()).results.values()
    (cut,) = run_job(lambda: train(**wanted), ()).results.values()
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loses", [False, True])
def test_states_are_numbered_by_whichever_worker_is_rank_0(loses: bool, tmp_path: Path) -> None:
    used = tmp_path / "checkpoints" / "checkpoint_4"
    used.mkdir(parents=True)

    def train() -> None:
        config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=4)
        accelerator = Accelerator(cpu=True, project_config=config)
        model, optimizer = pair()
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(), BATCH))
        for _ in er.remaining_epochs_until(EPOCHS):
            for x, y, _ in loader:
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state()

    outcome = run_job(train, (Kill(STEPS + 1, 1, "backward"),) if loses else (), first=(1, 2))
    assert len(outcome.results) == (1 if loses else 2)
    assert sorted(each.name for each in used.parent.iterdir()) == [f"checkpoint_{number}" for number in (4, 5, 6, 7)]


class Counter:
    """Something of the user's own, with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_what_is_registered_for_checkpointing_reaches_joiners(tmp_path: Path) -> None:
    def train() -> tuple[int, int]:
        accelerator = Accelerator(cpu=True)
        model, optimizer, scheduler = parts()
        loader: Any = DataLoader(numbers(), BATCH)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        accelerator.register_for_checkpointing(scheduler)  # as accelerate's own example does
        for _ in er.remaining_epochs_until(EPOCHS):
            for x, y, _ in loader:
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                counter.count += 1
        accelerator.save_state(str(tmp_path))
        with pytest.raises(RuntimeError, match="before the first epoch"):
            accelerator.register_for_checkpointing(Counter())
        return counter.count, scheduler.scheduler.last_epoch

    outcome = run_job(train, (*GROWS, LOSES[0]), first=(1,))
    assert set(outcome.results.values()) == {(STEPS * EPOCHS, STEPS * EPOCHS)}
    assert (tmp_path / "custom_checkpoint_1.pkl").exists()


def test_alone_a_second_training_may_register_too(tmp_path: Path) -> None:
    for _ in range(2):
        accelerator = Accelerator(cpu=True)
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        model, optimizer = pair()
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(), BATCH))
        for _ in er.remaining_epochs_until(1):
            for x, y, _ in loader:
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                counter.count += 1
        assert counter.count == STEPS


@pytest.mark.parametrize("which", ["main_process_first", "local_main_process_first"])
def test_who_is_first_runs_a_block_before_the_others(which: str) -> None:
    entered = threading.Event()

    def train() -> None:
        accelerator = Accelerator(cpu=True)
        model, optimizer = pair()
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(), BATCH))
        for _ in er.remaining_epochs_until(1):
            accelerator.wait_for_everyone()
            with getattr(accelerator, which)():
                if accelerator.is_main_process:
                    assert not entered.wait(0.5)
                else:
                    entered.set()
            for x, y, _ in loader:
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    run_job(train, (), first=(1, 2))
    assert entered.is_set()


class Scores(NamedTuple):
    """As models give them."""

    logits: torch.Tensor
    more: list[torch.Tensor]


def test_collectives_keep_the_structure_that_they_are_given() -> None:
    def train() -> None:
        accelerator = Accelerator(cpu=True)
        model, optimizer = pair()
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(), BATCH))
        for _ in er.remaining_epochs_until(1):
            rank = accelerator.process_index
            given = Scores(torch.full((rank + 1,), float(rank)), [torch.tensor(rank)])
            padded = accelerator.pad_across_processes(given)
            assert type(padded) is Scores and padded.logits.tolist() == [float(rank)] * (rank + 1) + [0.0] * (1 - rank)
            summed = accelerator.reduce(padded)
            assert type(summed) is Scores and summed.logits.tolist() == [1.0, 1.0] and int(summed.more[0]) == 1
            gathered = accelerator.gather_for_metrics(given)
            assert type(gathered) is Scores and gathered.logits.tolist() == [0.0, 1.0, 1.0]
            assert gathered.more[0].tolist() == [0, 1]
            texts = transformers.BatchEncoding({"ids": torch.tensor([[rank]])})
            assert type(accelerator.gather(texts)) is transformers.BatchEncoding
            for x, y, _ in loader:
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()

    run_job(train, (), first=(1, 2))


def test_loader_that_was_given_another_largest_batch_is_refused() -> None:
    own = er.AdaptiveDataLoader(numbers(), BATCH)
    own.autoscale_batch_size(2 * BATCH)
    with pytest.raises(ValueError, match=rf"max_batch_size={4 * BATCH}, but .* autoscale_batch_size\({2 * BATCH}\)"):
        Accelerator(cpu=True, max_batch_size=4 * BATCH).prepare(*pair(), own)


def test_loader_that_is_prepared_first_adapts_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="elastic_ray.integrations.batch_options")

    def train() -> tuple[int, ...]:
        accelerator = Accelerator(cpu=True, max_batch_size=4 * BATCH, elastic_options={"policy": LARGER})
        model, optimizer = pair()
        own = er.AdaptiveDataLoader(numbers(), BATCH)
        model, optimizer, loader, check = accelerator.prepare(model, optimizer, own, DataLoader(numbers(), 16))
        for _ in er.remaining_epochs_until(2):
            for x, y, _ in loader:
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return loader.current_batch_size, check.current_batch_size

    assert list(run_job(train, ()).results.values()) == [(4 * BATCH, 16)]
    (said,) = {each.getMessage() for each in caplog.records}
    assert said.startswith(f"max_batch_size={4 * BATCH} is that of the loader over a TensorDataset, with batches of 8")


def test_opening_that_failed_and_second_accelerator_leave_nothing_behind() -> None:
    set_session(None)
    for handed_over in (False, True, True):
        accelerator = Accelerator(cpu=True)
        model, optimizer, scheduler = parts()
        plain = accelerator  # a notebook keeps what a cell has named
        accelerator = Accelerator(cpu=True)
        plain.prepare(*pair())
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(), BATCH))
        if handed_over:
            scheduler = accelerator.prepare(scheduler)
        steps = 0
        refused: Any = contextlib.nullcontext() if handed_over else pytest.raises(ValueError, match="lr_scheduler=")
        with refused:
            for _ in er.remaining_epochs_until(1):
                for x, y, _ in loader:
                    accelerator.backward((model(x) - y).square().mean())
                    optimizer.step()
                    steps += 1
        assert steps == (STEPS if handed_over else 0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}, "dispatch_batches"),
    ({"rng_types": ["torch"]}, "rng_types"),
]


@pytest.mark.parametrize(("options", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_options_of_loaders_that_cannot_be_kept_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not supported under elastic-ray"):
        Accelerator(cpu=True, **options)


def test_a_stateful_loader_is_refused() -> None:
    config = DataLoaderConfiguration()
    config.use_stateful_dataloader = True  # of accelerate itself it needs another package
    with pytest.raises(ValueError, match="use_stateful_dataloader is not supported"):
        Accelerator(cpu=True, dataloader_config=config)


def test_the_seed_of_the_data_is_kept() -> None:
    def order(seed: int | None) -> list[int]:
        set_session(None)
        config = DataLoaderConfiguration(data_seed=seed, even_batches=False, split_batches=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        model, optimizer = pair()
        loader: Any = DataLoader(numbers(), BATCH, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        return [each for _ in er.remaining_epochs_until(1) for _, _, index in loader for each in index.tolist()]

    assert order(None) == order(0) != order(3) and sorted(order(3)) == list(range(SAMPLES))


def test_every_argument_is_accounted_for() -> None:
    """A new one must be kept, mapped or refused: say which in ``docs/huggingface.md``."""
    rows = arguments("huggingface.md", "Accelerator")
    own = [name for name in inspect.signature(accelerate.Accelerator.__init__).parameters if name != "self"]
    data = [f"DataLoaderConfiguration.{field.name}" for field in dataclasses.fields(DataLoaderConfiguration)]
    assert sorted(rows) == sorted([*own, *data])
    refused = {name.rpartition(".")[2] for name, what in rows.items() if what == "refused"}
    checked = _OF_ACCELERATOR.keys() - {"DistributedDataParallelKwargs"}
    assert refused == checked


def test_prepared_loader_is_data_loader_to_those_who_ask() -> None:
    set_session(None)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(numbers(), BATCH))
    assert isinstance(loader, DataLoader) and accelerator.prepare(loader) is loader
    assert (loader.total_batch_size, len(loader), loader.batch_size, loader.drop_last) == (BATCH, STEPS, BATCH, False)  # type: ignore[attr-defined]
    assert len(loader.dataset) == SAMPLES
