"""Several models under one ``GradScaler``, of which some drift and others do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.parallel.patches import scale_rollback
from tests.batch.waits import Waits
from tests.loop.changing import Change, run_job
from tests.loop.ranks import Ranks
from tests.sync.drifting import BATCH, EPOCHS, STEPS, net, rows, sgd, weights


def train(first: str, second: str, overflows: bool = True) -> Any:
    """In step 3 the first model's gradients overflow on rank 1; the scales and the second model after each step."""
    models = [net(), net()]
    optimizers = [sgd(model) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    wrapped = [
        er.AdaptiveDataParallel(
            model, optimizer, strategy=name, grad_scaler=scaler, scaling_rule="none", nonfinite="ignore"
        )
        for model, optimizer, name in zip(models, optimizers, (first, second), strict=True)
    ]
    context, scales, seen = er.get_context(), [], []
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, _ in er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3):
            spoilt = overflows and context.get_world_rank() == 1 and context.get_global_step() == 3
            for number, (model, optimizer) in enumerate(zip(wrapped, optimizers, strict=True)):
                optimizer.zero_grad()
                loss = model(x).square().mean() * (float("inf") if spoilt and number == 0 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            seen.append(weights(models[1]))
    return scales, seen, weights(models[0])


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("second", ["all_reduce", "int8"])
@pytest.mark.parametrize("first", ["local_sgd", "pair"])
def test_gradients_that_are_added_up_are_scaled_alike(ranks: Ranks, first: str, second: str) -> None:
    """What the drifting one does to the scale on one rank counts on all from the next step on."""
    ours, theirs = ranks.run(train, first, second, world=2)
    alone, _ = ranks.run(train, first, second, False, world=2)
    assert ours[0] == [256.0] * 4 + [128.0] * (STEPS - 4)
    assert theirs[0] == [256.0] * 3 + [128.0] * (STEPS - 3)
    assert all(torch.equal(one, other) for one, other in zip(ours[1], theirs[1], strict=True))
    torch.testing.assert_close(ours[1][-1], alone[1][-1], rtol=0, atol=1e-9 if second == "all_reduce" else 1e-2)
    assert torch.equal(ours[2], theirs[2])


def test_a_group_that_changes_goes_on_alike() -> None:
    results = run_job(
        lambda: train("local_sgd", "all_reduce"), [Change(3, (1, 2, 3)), Change(6, (2, 3))], first=(1, 2)
    ).results
    (_, ours, model), (_, theirs, other) = results[2], results[3]
    assert torch.equal(ours[-1], theirs[-1]) and torch.equal(model, other)


@pytest.mark.parametrize("used", [False, True])
def test_a_scalers_lost_step_is_not_read(used: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    if used:
        scaler.scale(torch.ones(1))
    snapshot, take_back = scale_rollback(scaler)
    with Waits() as waits:
        kept = copy.deepcopy(snapshot())
    scaler.scale(torch.ones(1))
    scaler.update(8.0)
    with Waits() as more:
        take_back(kept)
    assert waits.count == more.count == 0
    assert scaler.get_scale() == 256.0 and scaler.state_dict()["_growth_tracker"] == 0
