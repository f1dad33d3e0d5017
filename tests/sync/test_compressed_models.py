"""Compression where models have BatchNorm, and where there are several: nothing of a gradient is lost, as for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.loop.api import current_session
from tests.loop.changing import Change, run_job
from tests.sync.owed import (
    EPOCHS,
    NAMES,
    SAMPLES,
    WAYS,
    Loop,
    batches,
    exact,
    gradients,
    loss_of,
    net,
    owed_by,
    rows,
    total,
    ways,
)


class Normed(nn.Module):
    """Convolutions with BatchNorm, which normalises by what a rank has of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(3, 16, 2), nn.BatchNorm1d(16), nn.Conv1d(16, 12, 1)
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-0.5, 0.6, p.numel()).mul(29).sin().reshape(p.shape) + 0.03 * number)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.norm(self.first(x.view(-1, 3, 4))))).flatten(1)
        return out


@ways
def test_batch_norm(way: Any) -> None:
    """The exact gradient is that of each rank's own half, normalised by itself, as under DDP."""
    loop = Loop(way, make=Normed, batch_size=8)
    outcome = run_job(loop, first=(1, 2))
    model, wanted = Normed(), []
    for batch in batches(8):
        model.zero_grad()
        for half in batch.chunk(2):
            (loss_of(model, half) / 2).backward()
        wanted.append(gradients(model))
    sum_of_all = torch.stack(wanted).sum(0)
    owed = outcome.results[1] + outcome.results[2]
    assert bool(owed.any())
    assert float((total(loop) + owed - sum_of_all).norm()) < 1e-6 * float(sum_of_all.norm())


def training(way: Any) -> Any:
    """Parameters that move; the model, and its buffers after a pass."""
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=way)
    for _ in er.remaining_epochs_until(EPOCHS):
        for (x,) in er.AdaptiveDataLoader(rows(), batch_size=8, seed=3):
            optimizer.zero_grad()
            loss_of(wrapped, x).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.matrix(every=3)
@ways
@pytest.mark.parametrize("script", [[], [Change(4, (2, 3, 4))]])
def test_all_ranks_hold_one_model_and_its_statistics(way: Any, script: list[Change]) -> None:
    outcome = run_job(lambda: training(way), script, first=(1, 2))
    states = [outcome.results[worker] for worker in outcome.groups[-1]]
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in states[0])
    assert all(bool(value.isfinite().all()) for value in states[0].values())
    assert not torch.equal(states[0]["norm.running_mean"], torch.zeros(16))


class Several:
    """Two models in one loop; the gradients that each has applied, by step, and what it owes in the end."""

    def __init__(self, strategies: list[Any]) -> None:
        self._strategies = strategies
        self.applied: list[dict[int, Tensor]] = [{}, {}]

    def __call__(self) -> list[Tensor]:
        models = [net(), net()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
        wrapped = [
            er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=way, nonfinite="ignore")
            for model, optimizer, way in zip(models, optimizers, self._strategies, strict=True)
        ]
        for _ in er.remaining_epochs_until(EPOCHS):
            for (x,) in er.AdaptiveDataLoader(rows(), batch_size=7, seed=3, drop_last=True):
                for model, optimizer, applied in zip(wrapped, optimizers, self.applied, strict=True):
                    loss_of(model, x).backward()
                    if current_session().rank == 0:
                        applied[er.get_context().get_global_step()] = gradients(model.module)
                    optimizer.step()
                    optimizer.zero_grad()
        for model in wrapped:
            model._sync.remember()  # the last step counts
        return [owed_by(model) for model in wrapped]


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("script", [[], [Change(3, (2, 3, 4)), Change(7, (3, 4))]])
@pytest.mark.parametrize("second", [*WAYS, "all_reduce", "ps"], ids=[*NAMES, "all_reduce", "ps"])
@ways
def test_several_models(way: Any, second: Any, script: list[Change]) -> None:
    several = Several([way, second])
    outcome = run_job(several, script, first=(1, 2))
    wanted = exact().sum(0)
    assert outcome.told == [] and len(several.applied[0]) == SAMPLES // 7 * EPOCHS
    for number, applied in enumerate(several.applied):
        owed = torch.stack([outcome.results[worker][number] for worker in outcome.groups[-1]]).sum(0)
        found = torch.stack(list(applied.values())).sum(0)
        assert bool(owed.any()) == ([way, second][number] in WAYS)
        assert float((found + owed - wanted).norm()) < 1e-6 * float(wanted.norm())
