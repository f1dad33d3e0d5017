"""A rank that has waited for long leaves an announcement behind, which no collective of another kind may meet."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.consensus import announcer
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.loop.api import current_session
from elastic_ray.sync.averaging.consensus import agree
from tests.loop.ranks import Ranks

HELD_AT, STEPS = 5, 9


def made_equal_after_a_long_wait() -> list[list[float]]:
    """Rank 1 is late once; with that step all are to hold the same buffers. What each rank's are after each step."""
    announcer._PATIENCE_S = 0.1
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Linear(40, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    generator = torch.Generator().manual_seed(2)
    rows = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 3, generator=generator))
    session, rank, seen = current_session(), int(os.environ["RANK"]), []
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(rows, batch_size=8):
            step = session.progress.steps
            seen.append(model[1].running_mean.tolist())
            if step == HELD_AT and rank == 1:
                time.sleep(0.6)  # slower than the patience of the other
            if step == HELD_AT and rank == 0:
                session.run.agreed.wants_consensus = True
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    return seen


def test_buffers_are_made_equal_after_one_rank_was_late(ranks: Ranks) -> None:
    first, second = ranks.run(made_equal_after_a_long_wait, world=2)
    assert len(first) == len(second) == STEPS
    alike = [own == other for own, other in zip(first, second, strict=True)]
    assert alike == [step in (0, HELD_AT + 1) for step in range(STEPS)]


def agreed_beside_a_standing_announcement() -> Any:
    """Ranks hold different things; rank 0 has waited for long before."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    er.AdaptiveDataParallel(model, optimizer)
    for _ in er.remaining_epochs_until(1):
        session = current_session()
        rank, speaker = session.rank, session.consensus.announcer
        speaker.start_quietly(Announced(Intent.GRADIENTS), 0)
        if rank == 0:
            speaker._speak()
        speaker.done()
        own = {"both": torch.full((2,), float(rank)), f"of {rank}": torch.ones(3)}
        found = agree(session.group.communicator, own, holds=True, counts=True, changed=True)
        session.consensus.agree_on(Announced(Intent.EDGE))
        return {key: value.tolist() for key, value in sorted((found or {}).items())}


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("world", (2, 3))
def test_ranks_that_hold_different_things_tell_names_beside_it(ranks: Ranks, world: int) -> None:
    results = ranks.run(agreed_beside_a_standing_announcement, world=world)
    mean = sum(range(world)) / world
    expected = {"both": [mean, mean]} | {f"of {rank}": [1.0, 1.0, 1.0] for rank in range(world)}
    assert results == [expected] * world
