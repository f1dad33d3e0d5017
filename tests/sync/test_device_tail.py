"""Control values of a step where the CPU cannot read a bucket's memory: they are copied, and read at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.sync.engine.reduction import BucketLayout
from tests.loop.changing import Change, run_job
from tests.sync.sharded_parameters.sharded import BATCH, Net, data


def trained(strategy: str) -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped: Any = er.AdaptiveDataParallel(model, optimizer, strategy=strategy)
    loader = er.AdaptiveDataLoader(data(), batch_size=BATCH, seed=3)
    loader.autoscale_batch_size(max_batch_size=4 * BATCH, gradient_accumulation=True)
    for _ in er.remaining_epochs_until(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    return {**model.state_dict(), "gain": torch.tensor(wrapped.gain(4.0))}


@pytest.mark.parametrize("strategy", ["all_reduce", "zero2", "int8"])
def test_training_is_the_same_without_reading_memory(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    changes = (Change(4, (1, 2, 3)),)
    wanted = run_job(lambda: trained(strategy), changes, first=(1, 2)).results
    tail, looks = BucketLayout.tail, list[bool]()

    def unread(layout: BucketLayout) -> torch.Tensor:
        found = tail.fget(layout)  # type: ignore[attr-defined]
        layout._numbers = None
        looks.append(True)
        return found

    monkeypatch.setattr(BucketLayout, "tail", property(unread))
    found = run_job(lambda: trained(strategy), changes, first=(1, 2)).results
    assert looks and found.keys() == wanted.keys()
    for worker, values in wanted.items():
        for name, value in values.items():
            assert torch.equal(found[worker][name], value), (worker, name)
