"""Another way of synchronising gradients in place of all-reduce: the wrapper needs no more than the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.run.current import set_session


class Counting:
    """Leaves gradients as they are, and notes what it is asked for."""

    nonfinite_ranks, drift, is_open, local, strategy_key = None, None, False, False, ""
    gives_statistics, drifts, averages, settled, marker = True, False, False, True, 0
    calls: list[str]  # of the latest

    def __init__(self, *args: Any, **options: Any) -> None:
        Counting.calls = []

    def no_sync(self) -> Any:
        return nullcontext()

    def capture(self) -> Any:
        return {}

    def __getattr__(self, name: str) -> Any:
        if name not in (
            "before_forward",
            "before_update",
            "applied",
            "after_step",
            "collapse",
            "enter_group",
            "rebuild",
            "remember",
            "roll_back",
            "let_go",
        ):
            raise AttributeError(name)
        return lambda *args, **options: self.calls.append(name)


@pytest.fixture(autouse=True)
def own_session() -> Iterator[None]:
    set_session(None)
    yield
    set_session(None)


def test_a_model_trains_with_another_way_of_synchronising(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.parallel.model_parts.GradientEngine", Counting)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    before = model.weight.detach().clone()
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2):
            optimizer.zero_grad()
            wrapped(x).sum().backward()
            optimizer.step()
    assert torch.allclose(model.weight, before - 0.4), "two steps of two samples"
    assert Counting.calls == [
        "enter_group",
        *["remember", "before_forward", "before_update", "applied", "after_step"] * 2,
        "collapse",
    ]
