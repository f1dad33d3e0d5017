"""What compression leaves out costs no accuracy: a classifier of handwritten digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from tests.loop.ranks import Ranks

pytestmark = pytest.mark.slow

EPOCHS, BATCH, HELD_OUT = 12, 64, 360


def accuracy(strategy: Any) -> float:
    """On digits that it has not seen."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    data = torch.utils.data.TensorDataset(x[:-HELD_OUT], y[:-HELD_OUT])
    for _ in er.remaining_epochs_until(EPOCHS):
        for images, labels in er.AdaptiveDataLoader(data, batch_size=BATCH, seed=3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(images), labels).backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(x[-HELD_OUT:]).argmax(1) == y[-HELD_OUT:]).float().mean())


@pytest.mark.parametrize("strategy", ["powersgd", "int8", "bf16"])
def test_it_is_as_good_as_with_all_reduce(ranks: Ranks, strategy: str) -> None:
    wanted = ranks.run(accuracy, "all_reduce", world=2)[0]
    found = ranks.run(accuracy, strategy, world=2)
    assert wanted > 0.9 and found[0] == found[1]
    assert found[0] > wanted - 0.02
