"""Gradients that are accumulated where models are averaged: as without, and as by hand in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_ray.sync import Strategy
from tests.loop.changing import Change, run_job
from tests.loop.ranks import Ranks
from tests.sync.averages import AVERAGES
from tests.sync.drifting import EPOCHS, SAMPLES, STEPS, Loop, sgd


def train(name: str, micro: int | None, every: int) -> Any:
    return Loop(Strategy(average=AVERAGES[name]), sgd, micro=micro, every=every)()


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("name", [name for name in AVERAGES if name != "pair"])  # its pulls come at any time
def test_micro_batches_give_the_model_of_whole_ones(ranks: Ranks, name: str) -> None:
    whole = ranks.run(train, name, None, 1, world=2)
    found = ranks.run(train, name, 2, 1, world=2)
    assert len(found[0][1]) == 3 * STEPS, "three micro-batches a step"
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][0], whole[0][0], rtol=0, atol=1e-9)


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("name", AVERAGES)
def test_steps_added_up_by_hand_are_each_ranks_own(ranks: Ranks, name: str) -> None:
    found = ranks.run(train, name, None, 2, world=2)
    assert torch.equal(found[0][0], found[1][0]) and found[0][0].isfinite().all()
    for _, seen in found:
        moved = [each.applied for each in seen]
        assert moved == [bool(step % 2) for step in range(STEPS)]
    assert any(not torch.equal(one.after, other.after) for one, other in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize(("micro", "every"), [(2, 1), (None, 2)])
@pytest.mark.parametrize("name", ["local_sgd", "sma", "pair"])
def test_a_group_changes_within(name: str, micro: int | None, every: int) -> None:
    """A planned change waits for gradients that are each rank's own."""
    script = [Change(2, (1, 2, 3)), Change(6, (2, 3))]
    loop = Loop(Strategy(average=AVERAGES[name]), sgd, micro=micro, every=every)
    outcome = run_job(loop, script, first=(1, 2))
    assert outcome.told == [] and outcome.groups[-1] == (2, 3)
    assert torch.equal(outcome.results[2][0], outcome.results[3][0])
    counts = [0] * SAMPLES
    for _, seen in outcome.results.values():
        for each in seen:
            for sample in each.samples:
                counts[sample] += 1
    assert max(counts) <= EPOCHS
