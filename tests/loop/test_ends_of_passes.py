"""A worker is lost where all have agreed that a pass is over: the others are through it, and a joiner is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from tests.loop.changing import Kill, run_job

SAMPLES, BATCH, EPOCHS = 24, 6, 3
STEPS = SAMPLES // BATCH


def train(strategy: str) -> dict[str, Any]:
    """A model with a buffer, and a collective of the loop's own after each pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    x = torch.linspace(-1, 1, 3 * SAMPLES, dtype=torch.float64).view(SAMPLES, 3)
    seen, evaluated, agreed = [], 0, []
    for epoch in er.remaining_epochs_until(EPOCHS):
        for (rows,) in er.AdaptiveDataLoader(TensorDataset(x), batch_size=BATCH, seed=1):
            seen.append(rows)
            optimizer.zero_grad()
            wrapped(rows).square().mean().backward()
            optimizer.step()
        agreed.append((epoch, er.all_reduce(1)))
        with torch.no_grad():
            for (rows,) in er.AdaptiveDataLoader(TensorDataset(x), batch_size=BATCH, shuffle=False):
                evaluated += len(rows)
        agreed.append((epoch, er.all_reduce(1)))
    return {"seen": len(torch.cat(seen)), "agreed": agreed, "weights": model[0].weight.detach()}


@pytest.mark.parametrize("joins", [(), (4,)], ids=["none-joins", "one-joins"])
@pytest.mark.parametrize("step", [STEPS, 2 * STEPS], ids=["training", "evaluation"])
@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd"])
def test_nobody_ends_the_pass_again(strategy: str, step: int, joins: tuple[int, ...]) -> None:
    script = [Kill(step, 1, "end_of_pass", after=(2, 3), joins=joins)]
    outcome = run_job(lambda: train(strategy), script, first=(1, 2, 3))
    assert set(outcome.results) == {2, 3, *joins}
    size = 2 + len(joins)
    for worker in (2, 3):
        found = outcome.results[worker]
        assert [epoch for epoch, _ in found["agreed"]] == [epoch for epoch in range(EPOCHS) for _ in range(2)]
        assert found["agreed"][-1][1] == size
    weights = [each["weights"] for each in outcome.results.values()]
    assert all(torch.equal(each, weights[0]) for each in weights)
