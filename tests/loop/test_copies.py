"""Copies of the wrapped model: of its weights at one moment, which nothing trains."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.run.current import set_session
from elastic_ray.sync import ShardedEmbedding
from tests.loop.changing import run_job


def _train(wrapped: Any, optimizer: Any, behind: Any) -> None:
    data = TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(0)))
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(data, batch_size=8, shuffle=False):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            behind()


def _made(strategy: str | None = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy), optimizer


def _reloaded(wrapped: Any) -> Any:
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("take", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each)), _reloaded])
def test_a_copy_has_the_weights_of_its_moment(take: Any, workers: int) -> None:
    def train() -> None:
        wrapped, optimizer = _made()
        kept: list[Any] = []

        def behind() -> None:
            kept.append((take(wrapped), {k: v.clone() for k, v in wrapped.state_dict().items()}))

        _train(wrapped, optimizer, behind)
        first, then = kept[0]
        assert list(first.state_dict()) == list(then) and "module.0.weight" in then
        assert all(torch.equal(value, then[name]) for name, value in first.state_dict().items())
        assert not torch.equal(then["module.0.weight"], wrapped.state_dict()["module.0.weight"])
        first.eval()
        first(torch.ones(4, 2)).sum().backward()  # reduces nothing, on no rank but this
        assert wrapped.training and first.module[0].weight.grad is not None
        assert isinstance(first, DistributedDataParallel) and isinstance(wrapped, DistributedDataParallel)

    run_job(train, first=tuple(range(1, workers + 1)))


@pytest.mark.parametrize("strategy", [None, "zero1", "zero2"])
def test_an_averaged_model_follows_the_wrapped_one(strategy: str | None) -> None:
    def train() -> list[float]:
        wrapped, optimizer = _made(strategy)
        average = AveragedModel(wrapped, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        plain = [p.detach().clone() for p in wrapped.parameters()]
        first = [True]

        def behind() -> None:
            average.update_parameters(wrapped)
            for mine, p in zip(plain, wrapped.parameters(), strict=True):
                mine.copy_(p.detach() if first[0] else 0.5 * mine + 0.5 * p.detach())
            first[0] = False

        _train(wrapped, optimizer, behind)
        for mine, p in zip(plain, average.module.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), mine)
        assert average(torch.ones(4, 2)).shape == (4, 1)
        return [p.sum().item() for p in average.parameters()]

    one, two, three = run_job(train, first=(1, 2, 3)).results.values()
    assert one == two == three


@pytest.mark.parametrize("kind", ["shards", "table"])
def test_a_model_spread_over_workers_is_refused_by_name(kind: str) -> None:
    def train() -> None:
        if kind == "shards":
            model: Any = er.fully_shard(nn.Linear(2, 1))
        else:
            model = nn.Sequential(ShardedEmbedding(8, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        if kind == "shards":
            _train(wrapped, optimizer, lambda: None)
        else:
            for _ in er.remaining_epochs_until(1):
                for ids in er.AdaptiveDataLoader(torch.arange(8), batch_size=4):
                    wrapped(ids)
        name = "parameters .fully_shard." if kind == "shards" else "rows of 0 .ShardedEmbedding."
        for take in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"{name} lie with several workers: call state_dict"):
                take(wrapped)

    run_job(train)


def test_torchs_checkpoint_functions_know_names_of_the_model_inside() -> None:
    def train() -> None:
        wrapped, optimizer = _made()
        _train(wrapped, optimizer, lambda: None)
        weights, state = get_state_dict(wrapped, optimizer)
        assert set(weights) == set(wrapped.module.state_dict()) == set(get_model_state_dict(wrapped))
        assert set(state["state"]) == {name for name, _ in wrapped.module.named_parameters()}
        then = {name: value.clone() for name, value in weights.items()}
        with torch.no_grad():
            wrapped.module[0].weight.zero_()
        set_state_dict(wrapped, optimizer, model_state_dict=dict(then), optim_state_dict=state)
        assert torch.equal(wrapped.module[0].weight, then["0.weight"])

    run_job(train, first=(1, 2))


@pytest.mark.parametrize("take", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_scheduler_s_copy_is_of_its_own_class(take: Any) -> None:
    set_session(None)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    er.AdaptiveDataParallel(model, optimizer, lr_scheduler=scheduler)
    scheduler.step()
    copied = take(scheduler)
    assert type(copied) is torch.optim.lr_scheduler.StepLR
    assert (copied.state_dict(), copied.get_last_lr()) == (scheduler.state_dict(), [0.5])


def test_a_scaler_s_copy_is_of_its_own_class() -> None:
    set_session(None)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    er.AdaptiveDataParallel(model, optimizer, grad_scaler=scaler)
    copied = pickle.loads(pickle.dumps(scaler))
    assert type(copied) is torch.amp.GradScaler and copied.state_dict() == scaler.state_dict()
