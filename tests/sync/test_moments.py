"""Strategies that are asked for at bad moments: before training, in a resize, within a step, on one rank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import elastic_ray as er
from tests.loop.changing import Change, run_job
from tests.sync.switching import Tabled, Trainee, data


def asking(at: int, strategy: str, *, begin: str = "all_reduce", worker: int | None = None) -> Any:
    """A train function that asks for a strategy in step ``at`` (-1: before the first epoch), on one worker or all."""

    def train() -> tuple[Tensor, list[str]]:
        trainee = Trainee(begin)
        if at < 0:
            trainee.wrapped.set_strategy(strategy)

        def between(trainee: Trainee, step: int) -> None:
            context = er.get_context()
            if context.get_global_step() == at and worker in (None, context.get_world_rank()):
                trainee.wrapped.set_strategy(strategy)

        trainee.train(between)
        return trainee.parameters, trainee.used

    return train


def test_a_choice_before_the_first_epoch_begins_everywhere() -> None:
    results = run_job(asking(-1, "auto"), first=(1, 2)).results
    assert torch.equal(results[1][0], results[2][0]) and results[1][1] == results[2][1]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("at", [4, 5, 6])
def test_choice_around_a_change_of_group_is_the_groups(at: int) -> None:
    results = run_job(asking(at, "auto"), [Change(5, (1, 2))], first=(1,)).results
    assert torch.equal(results[1][0], results[2][0])


def nested(ask: bool) -> Tensor:
    """Two micro-batches a step; between them an evaluation, in which another strategy is asked for or not."""

    def train() -> Tensor:
        torch.manual_seed(0)
        model = Tabled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        loader = er.AdaptiveDataLoader(data(40), batch_size=20)
        loader.autoscale_batch_size(20, local_bsz_bounds=(1, 5), gradient_accumulation=True)
        evaluation = er.AdaptiveDataLoader(data(20), batch_size=20)
        passes = 0
        for _ in er.remaining_epochs_until(1):
            for ids, y in loader:
                optimizer.zero_grad()
                (wrapped(ids) - y).square().mean().backward()
                optimizer.step()
                passes += 1
                if passes == 1:
                    if ask:
                        wrapped.set_strategy("partitioned_ar")
                    with torch.no_grad():
                        for others, _ in evaluation:
                            wrapped(others)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    parameters: Tensor = run_job(train, first=(1, 2)).results[1]
    return parameters


def test_strategy_waits_for_half_made_gradients_of_a_step() -> None:
    torch.testing.assert_close(nested(ask=True), nested(ask=False), rtol=0, atol=1e-6)


def test_strategy_in_force_may_be_asked_on_one_rank() -> None:
    results = run_job(asking(5, "parallax", begin="parallax", worker=0), first=(1, 2)).results
    assert torch.equal(results[1][0], results[2][0])
