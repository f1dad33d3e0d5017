"""Lightning Fabric's loops as elastic jobs."""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic_ray as er
from tests.loop.changing import Change, Kill, run_job

fabric_module = pytest.importorskip("lightning.fabric")

from elastic_ray.integrations.lightning import ElasticRayFabricStrategy  # noqa: E402

SAMPLES, BATCH, EPOCHS = 48, 8, 2
STEPS = SAMPLES // BATCH

pytestmark = pytest.mark.filterwarnings("ignore")


def dataset() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))


def model() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return net


def train(
    used: collections.Counter[tuple[int, int]] | None = None,
    elastic: bool = True,
    folder: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A loop of Fabric's documentation style."""
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    fabric = fabric_module.Fabric(
        accelerator="cpu", devices=1, **({"strategy": ElasticRayFabricStrategy(**options)} if elastic else {})
    )
    fabric.launch()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if elastic:
        wrapped, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=scheduler)
    else:
        wrapped, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset(), BATCH, shuffle=False))
    sums = []
    for epoch in er.remaining_epochs_until(EPOCHS) if elastic else range(EPOCHS):
        total = torch.zeros(())
        for x, y, index in loader:
            optimizer.zero_grad()
            loss = (wrapped(x) - y).square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
            optimizer.step()
            total += fabric.all_reduce(torch.tensor(float(len(x))), reduce_op="sum")
            if used is not None:
                used.update((epoch, each) for each in index.tolist())
        scheduler.step()
        sums.append(float(total))
        if folder is not None:
            fabric.save(folder / "state.ckpt", {"model": wrapped, "optimizer": optimizer, "epoch": epoch})
        fabric.barrier()
    gathered = fabric.all_gather(torch.tensor([float(fabric.global_rank)]))
    return {
        "weights": {name: p.detach().clone() for name, p in net.named_parameters()},
        "lr": optimizer.param_groups[0]["lr"],
        "sums": sums,
        "ranks": gathered.flatten().tolist(),
        "told": fabric.broadcast({"path": [1, "a"]}),
        "zero": fabric.is_global_zero,
    }


@pytest.mark.parametrize(
    ("script", "first"),
    [
        ([], (1, 2)),
        ([Change(3, (1, 2, 3)), Change(STEPS + 2, (1, 2))], (1,)),
        ([Kill(3, 2, "backward"), Kill(STEPS, 3, "edge")], (1, 2, 3)),
    ],
)
def test_training_is_that_of_one_device(script: Sequence[Any], first: Sequence[int], tmp_path: Path) -> None:
    alone = train(elastic=False)
    used: collections.Counter[tuple[int, int]] = collections.Counter()
    outcome = run_job(lambda: train(used, folder=tmp_path), script, first=first)
    for result in outcome.results.values():
        for name, value in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-5)
        assert result["lr"] == alone["lr"] and result["told"] == {"path": [1, "a"]}
        assert result["ranks"] == [float(rank) for rank in range(len(outcome.groups[-1]))]
    if first != (1, 2, 3):
        assert used == {(epoch, each): 1 for epoch in range(EPOCHS) for each in range(SAMPLES)}
    assert sum(result["zero"] for result in outcome.results.values()) == 1
    saved = torch.load(tmp_path / "state.ckpt", weights_only=True)
    net = model()
    net.load_state_dict(saved["model"])
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), alone["weights"][name], rtol=1e-4, atol=1e-5)


def test_an_adaptive_batch_accumulates() -> None:
    alone = train(elastic=False)
    options = {"max_batch_size": BATCH, "local_bsz_bounds": (1, 4), "gradient_accumulation": True}
    (result,) = run_job(lambda: train(**options), []).results.values()
    for name, value in alone["weights"].items():
        torch.testing.assert_close(result["weights"][name], value, rtol=1e-4, atol=1e-5)


def _with_two_optimizers(elastic: bool) -> list[torch.Tensor]:
    options = {"strategy": ElasticRayFabricStrategy()} if elastic else {}
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, **options)
    fabric.launch()
    net = model()
    first, *rest = net.parameters()
    wrapped, *optimizers = fabric.setup(net, torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.Adam(rest))
    loader = fabric.setup_dataloaders(DataLoader(dataset(), BATCH, shuffle=False))
    for _ in er.remaining_epochs_until(EPOCHS) if elastic else range(EPOCHS):
        for x, y, _ in loader:
            for each in optimizers:
                each.zero_grad()
            fabric.backward((wrapped(x) - y).square().mean())
            for each in optimizers:
                each.step()
    return [p.detach().clone() for p in net.parameters()]


def test_several_optimizers() -> None:
    alone = _with_two_optimizers(False)
    for result in run_job(lambda: _with_two_optimizers(True), [Change(3, (1, 2, 3))], first=(1, 2)).results.values():
        for mine, theirs in zip(result, alone, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_kept_is_refused() -> None:
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, strategy=ElasticRayFabricStrategy())
    fabric.launch()
    net = model()
    with pytest.raises(RuntimeError, match="jointly set them up"):
        fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="devices must be 1"):
        fabric_module.Fabric(accelerator="cpu", devices=2, strategy=ElasticRayFabricStrategy())
    with pytest.raises(ValueError, match="max_batch_size"):
        ElasticRayFabricStrategy(gradient_accumulation=True)
    with pytest.raises(NotImplementedError, match="sync_grads"):
        fabric.all_gather(torch.ones(1), sync_grads=True)
    with pytest.raises(ValueError, match="reduce_op must be one of"):
        fabric.all_reduce(torch.ones(1), reduce_op="median")


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [("2.6.6+cu", False), ("2.7.0", True), ("2.7rc1", True), ("2.7.0.dev1", True), ("3", True), ("of none", False)],
)
def test_newer_versions_are_named(version: str, is_newer: bool) -> None:
    from elastic_ray.integrations import overridden

    assert overridden.is_newer(version, "2.6") == is_newer


def test_libraries_without_metadata_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_ray.integrations import overridden

    monkeypatch.setattr(overridden, "version", lambda _: None)
    overridden.check_overridden("lightning", "lightning", {fabric_module.Fabric: ["launch"]})


def test_version_without_what_we_override_is_said_by_name() -> None:
    from elastic_ray.integrations.overridden import check_overridden

    with pytest.raises(ImportError, match=r"builds on Fabric.launched of lightning, which lightning 2.* does not have"):
        check_overridden("lightning", "lightning", {fabric_module.Fabric: ["launch", "launched"]})
