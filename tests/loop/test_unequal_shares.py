"""Unequal shares of a step: the gradient is the whole batch's all the same, and so is the noise that it shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.stragglers.detection import SlowWorker, StragglerCause
from tests.loop.ranks import Ranks

SAMPLES, EPOCHS, BATCH = 56, 3, 12


def _slow(weights: list[float]) -> dict[str, Any]:
    """State of a watch by which ranks take such shares."""
    session = current_session()
    slow = [
        SlowWorker(worker=str(rank), node="n", ratio=1 / weight, cause=StragglerCause.WORKER, weight=weight)
        for rank, weight in enumerate(weights)
        if weight < 1.0
    ]
    watch = session.run.stragglers
    watch.slow = tuple(slow)
    return watch.capture()


def trained(weights: list[float], optimizer_name: str, accumulate: bool) -> dict[str, Any]:
    """Train with these shares from the second epoch on; parameters, what was drawn, sizes of own batches, noise."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    rows = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator).double(),
        torch.randint(3, (SAMPLES,), generator=generator),
        torch.arange(SAMPLES),
    )
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    makers = {"sgd": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}
    makers["adam"] = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = makers[optimizer_name]
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(rows, batch_size=BATCH, seed=3)
    if accumulate:
        loader.autoscale_batch_size(BATCH, local_bsz_bounds=(1, 3), gradient_accumulation=True)
    drawn: list[list[int]] = []
    for epoch in er.remaining_epochs_until(EPOCHS):
        drawn.append([])
        if epoch == 1 and len(weights) > 1:
            watch = current_session().run.stragglers
            watch.restore(_slow(weights))
        for x, y, index in loader:
            drawn[-1].extend(index.tolist())
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "drawn": drawn,
        "noise": wrapped.noise_scale,
    }


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("optimizer", ("sgd", "adam"))
@pytest.mark.parametrize("weights", ([1.0, 0.3], [0.5, 1.0, 0.2]))
@pytest.mark.parametrize("accumulate", (False, True))
def test_parameters_equal_those_of_one_process(
    ranks: Ranks, weights: list[float], optimizer: str, accumulate: bool
) -> None:
    alone = ranks.run(trained, [1.0], optimizer, accumulate)
    results = ranks.run(trained, weights, optimizer, accumulate, world=len(weights))
    for result in results:
        for own, plain in zip(result["parameters"], alone["parameters"], strict=True):
            assert torch.allclose(own, plain, rtol=1e-9, atol=1e-11)
    for epoch in range(EPOCHS):
        assert sorted(index for result in results for index in result["drawn"][epoch]) == list(range(SAMPLES))
    if not accumulate:
        counts = [len(result["drawn"][-1]) for result in results]
        assert counts[weights.index(min(weights))] < 0.6 * max(counts), "shares were unequal"
