"""Ray Train's ``prepare_model`` and ``prepare_data_loader`` in an elastic job: the training of one process."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import pytest
import ray.train
import ray.train.torch
import torch
from ray.train.collective import barrier, broadcast_from_rank_zero
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from elastic_ray.integrations import ray_train
from elastic_ray.loop.api import current_session
from elastic_ray.run.run import Group
from elastic_ray.worker.in_ray_train import in_ray_train
from tests.loop.changing import Change, Kill, run_job

SAMPLES, BATCH, EPOCHS = 48, 8, 3
STEPS = SAMPLES // BATCH


def rows() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))


def net() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return made


def script(epochs: Any, used: Any = None) -> dict[str, Any]:
    """A train function in the style of Ray Train's documentation."""
    model: Any = ray.train.torch.prepare_model(net())
    loader: Any = ray.train.torch.prepare_data_loader(DataLoader(rows(), batch_size=BATCH))
    assert isinstance(loader, DataLoader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seed = broadcast_from_rank_zero({"seed": 3})
    for epoch in epochs():
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for x, y, index in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if used is not None:
                used.update((epoch, each) for each in index.tolist())
        scheduler.step()
        barrier()
        ray.train.report({"epoch": epoch})
    state = model.module.state_dict()
    return {"weights": {k: v.clone() for k, v in state.items()}, "lr": scheduler.get_last_lr()[0], **seed}


def plain_script(evaluates: bool, *, anew: bool = False) -> dict[str, Any]:
    """The same over a plain range, as its author left it: what the loop's body sets is used after it."""
    model: Any = ray.train.torch.prepare_model(net())
    loader: Any = ray.train.torch.prepare_data_loader(DataLoader(rows(), batch_size=BATCH))
    valid: Any = ray.train.torch.prepare_data_loader(DataLoader(rows(), batch_size=BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    epochs = []
    for epoch in range(EPOCHS):
        model.train()
        if anew:
            loader = ray.train.torch.prepare_data_loader(DataLoader(rows(), batch_size=BATCH))
        for x, y, _ in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if evaluates:
            model.eval()
            total = 0.0
            with torch.no_grad():
                for x, y, _ in valid:
                    total += (model(x) - y).square().sum().item()
        barrier()
        epochs.append(epoch)
        ray.train.report({"epoch": epoch, "loss": loss.item()})
    state = model.module.state_dict()
    return {"weights": {k: v.clone() for k, v in state.items()}, "lr": scheduler.get_last_lr()[0], "epochs": epochs}


def alone() -> dict[str, Any]:
    """The same without Ray."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5**epoch
        for x, y, _ in DataLoader(rows(), BATCH):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ((), (1,)),
        ((Change(3, (1, 2, 3)), Change(STEPS + 3, (1, 2))), (1,)),
        ((Kill(2, 2, "backward"), Kill(STEPS, 3, "edge", joins=(4,))), (1, 2, 3)),
        ((Kill(STEPS, 2, "collective", joins=(3,)),), (1, 2)),
    ],
)
def test_it_trains_as_one_process_does(changes: Sequence[Any], first: Sequence[int]) -> None:
    used: collections.Counter[tuple[int, int]] = collections.Counter()
    with in_ray_train():
        outcome = run_job(lambda: script(lambda: er.remaining_epochs_until(EPOCHS), used), changes, first=first)
    expected = alone()
    for result in outcome.results.values():
        for name, value in expected.items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-5)
        assert result["lr"] == 0.1 * 0.5**EPOCHS and result["seed"] == 3
    if not any(isinstance(each, Kill) for each in changes):
        assert used == {(epoch, each): 1 for epoch in range(EPOCHS) for each in range(SAMPLES)}


@pytest.mark.thorough
@pytest.mark.matrix(every=6)
@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluates too", "trains"])
@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ((), (1, 2)),
        ((Change(3, (1, 2, 3)), Change(STEPS + 3, (1, 2))), (1,)),
        ((Change(2 * STEPS + 1, (1, 2, 3)), Change(3 * STEPS - 1, (2, 3))), (1,)),
        ((Change(2 * STEPS, (1, 2)),), (1,)),
        ((Kill(2, 2, "backward"), Kill(STEPS, 3, "edge", joins=(4,))), (1, 2, 3)),
        ((Kill(2 * STEPS, 2, "collective", joins=(3,)),), (1, 2)),
    ],
)
def test_an_unchanged_script_trains_as_one_process_does(
    changes: Sequence[Any], first: Sequence[int], *, evaluates: bool
) -> None:
    with in_ray_train():
        outcome = run_job(lambda: plain_script(evaluates), changes, first=first)
    expected = alone()
    assert outcome.results
    for result in outcome.results.values():
        for name, value in expected.items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-5)
        assert result["lr"] == 0.1 * 0.5**EPOCHS and result["epochs"] == list(range(EPOCHS))


@pytest.mark.thorough
def test_a_script_that_makes_its_loader_in_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "most_workers", 1)  # which a job knows, and these threads do not
    with in_ray_train():
        outcome = run_job(lambda: plain_script(True, anew=True), (Change(2 * STEPS + 1, (1, 2)),), first=(1,))
    for result in outcome.results.values():
        for name, value in alone().items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-5)


def test_epochs_are_counted_in_one_way() -> None:
    def mixed() -> None:
        script(lambda: range(1))
        list(er.remaining_epochs_until(1))

    with in_ray_train(), pytest.raises(RuntimeError, match="or not at all"):
        run_job(mixed, (), first=(1,))


def test_ray_s_own_functions_are_as_before_afterwards() -> None:
    from ray.train.v2.torch import train_loop_utils

    before = train_loop_utils.DistributedDataParallel, train_loop_utils._WrappedDataLoader  # type: ignore[attr-defined]
    with in_ray_train():
        assert train_loop_utils.DistributedDataParallel is not before[0]  # type: ignore[attr-defined]
    assert (train_loop_utils.DistributedDataParallel, train_loop_utils._WrappedDataLoader) == before  # type: ignore[attr-defined]


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(("enabled", "refused"), [((True,), False), ((True, False), False), ((True, True), True)])
def test_of_several_scalers_none_is_taken_silently(enabled: Sequence[bool], refused: bool) -> None:
    """One that an earlier part of the script has left would scale the loss of a model that does not know of it."""
    for each in ray_train._objects(torch.amp.GradScaler):
        each._enabled = False  # other tests may have left theirs
    scalers = [torch.amp.GradScaler("cpu", enabled=each) for each in enabled]
    if not refused:
        assert ray_train._scaler() is scalers[0]
        return
    with pytest.raises(RuntimeError, match=r"GradScaler is the model's, .* holds 2: let go .* grad_scaler=\.\.\.\)"):
        ray_train._scaler()


def test_prepared_loader_keeps_options_of_one_that_was_given() -> None:
    given = DataLoader(
        rows(), BATCH, num_workers=2, multiprocessing_context="spawn", in_order=False, pin_memory_device="cuda:0",
        prefetch_factor=3, timeout=7,
    )  # fmt: skip
    prepared = ray_train.loader(given, torch.device("cpu"))
    assert prepared.multiprocessing_context.get_start_method() == "spawn" and prepared.in_order is False
    assert (prepared.pin_memory_device, prepared.prefetch_factor, prepared.timeout) == ("cuda:0", 3, 7)
    assert prepared.batch_size == BATCH * current_session().group.most_workers
    assert ray_train.loader(DataLoader(rows(), 1), torch.device("cpu")).batch_size == 1


def test_a_prepared_model_has_the_attributes_of_the_model() -> None:
    module: Any = net()
    module.hidden = 6
    assert ray_train.model(module).hidden == 6
