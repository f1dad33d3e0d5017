"""The noise scale is that of exact gradients under every strategy: in each step, or on steps that are sent plainly.

Each step takes all samples, in one order, and the learning rate is 0: every step's statistics are the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.sync import PowerSGD
from placement.goodput.model import NoiseScale
from tests.loop.changing import Change, run_job

SAMPLES, EPOCHS = 24, 40


def loop(strategy: Any, optimizer: str = "sgd", scaling_rule: str = "none") -> Any:
    """A train function that returns the last noise scale and the gain at scale 2."""

    def train() -> tuple[NoiseScale | None, float]:
        model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16))
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.copy_(torch.linspace(-0.5, 0.6, p.numel()).sin().reshape(p.shape) + 0.03 * number)
        kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
        stepped = kind(model.parameters(), lr=0.0)
        wrapped = er.AdaptiveDataParallel(model, stepped, scaling_rule=scaling_rule, strategy=strategy)
        generator = torch.Generator().manual_seed(7)
        data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 12, generator=generator))
        for _ in er.remaining_epochs_until(EPOCHS):
            for (x,) in er.AdaptiveDataLoader(data, batch_size=SAMPLES, shuffle=False):
                stepped.zero_grad()
                wrapped(x).square().sum(1).mean().backward()
                stepped.step()
        return wrapped.noise_scale, wrapped.gain(2)

    return train


def measured(train: Any, script: Any = (), workers: int = 2) -> tuple[NoiseScale, float]:
    """The same on all workers."""
    found = list(run_job(train, script, first=tuple(range(1, workers + 1))).results.values())
    assert all(each == found[0] for each in found)
    noise, gain = found[0]
    assert noise is not None
    return noise, gain


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "strategy", ["bf16", "fp16", "ps_balanced", "partitioned_ar", "int8", PowerSGD(rank=1)], ids=str
)
@pytest.mark.matrix(every=4)
def test_every_strategy_measures_the_same_noise(strategy: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.sync.engine.reduction.PROBE_EVERY", 8)
    if optimizer == "adam" and isinstance(strategy, PowerSGD):
        pytest.skip("Adam's units are others where a matrix's small elements are sent late")
    wanted, gain = measured(loop("all_reduce", optimizer))
    noise, theirs = measured(loop(strategy, optimizer))
    # Adam's units are from the gradients that it was given, which rounding makes others in every step.
    assert noise.var == pytest.approx(wanted.var, rel=1e-3 if optimizer == "sgd" else 0.02)
    if optimizer == "sgd":
        assert noise.sqr == pytest.approx(wanted.sqr, rel=1e-3)
    assert theirs == pytest.approx(gain, rel=1e-3 if optimizer == "sgd" else 0.02) and theirs > 1.0


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("strategy", ["int8", "powersgd"])
def test_it_is_measured_across_changes(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks have shares of another size each, so that estimates differ from group to group."""
    monkeypatch.setattr("elastic_ray.sync.engine.reduction.PROBE_EVERY", 8)
    measured(loop(strategy, scaling_rule="adascale"), [Change(3, (1, 2, 3)), Change(7, (1, 3))])
