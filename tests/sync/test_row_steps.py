"""Optimizers step tables that are shown as rows, by whatever strategy: same bits on all ranks, same steps as torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.sync import Parallax
from tests.loop.changing import run_job
from tests.sync.switching import Tabled, Trainee, data


def hooked() -> tuple[Tensor, list[torch.layout]]:
    """Trains by Adagrad; rank 0 alone looks at gradients, before it steps and after."""
    torch.manual_seed(0)
    model, seen = Tabled(), []

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        assert model.table.weight.grad is not None
        seen.append(model.table.weight.grad.layout)

    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    optimizer.register_step_post_hook(look)
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy="parallax", scaling_rule="none")
    for _ in er.remaining_epochs_until(1):
        for step, (ids, y) in enumerate(er.AdaptiveDataLoader(data(), batch_size=20)):
            optimizer.zero_grad()
            (wrapped(ids) - y).square().mean().backward()
            if step == 1 and current_session().group.rank_info.rank == 0:
                optimizer.register_step_pre_hook(look)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), seen


def test_a_hook_on_one_rank_sees_dense_gradients_harmlessly() -> None:
    (one, seen), (other, also) = run_job(hooked, first=(1, 2)).results.values()
    assert torch.equal(one, other)
    assert sorted([len(seen), len(also)]) == [20, 39] and {*seen, *also} == {torch.strided}


def switched(first: Any, then: Any, *, nesterov: bool) -> Any:
    """Trains with momentum under one strategy, and from its fourth step on under another."""

    def train() -> Tensor:
        trainee = Trainee(first)
        for group in trainee.optimizer.param_groups:
            group.update(momentum=0.9, lr=0.002, nesterov=nesterov)

        def between(trainee: Trainee, step: int) -> None:
            if step == 3:
                trainee.wrapped.set_strategy(then)

        trainee.train(between, epochs=1)
        return trainee.parameters

    return train


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Parallax(update="sparse"), Parallax(update="dense")),
        (Parallax(update="sparse"), "all_reduce"),
        ("all_reduce", Parallax(update="sparse")),
    ],
    ids=["dense rows", "all_reduce", "sparse rows"],
)
def test_momentum_goes_on_where_gradients_change_their_layout(first: Any, then: Any, nesterov: bool) -> None:
    one, other = run_job(switched(first, then, nesterov=nesterov), first=(1, 2)).results.values()
    wanted = run_job(switched("all_reduce", "all_reduce", nesterov=nesterov), first=(1,)).results[1]
    assert torch.equal(one, other)
    torch.testing.assert_close(one, wanted, rtol=1e-3, atol=1e-6)
