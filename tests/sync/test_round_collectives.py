"""Collectives of an epoch of averaged models: how many there are, and what no rank waits for."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.communication import communicator
from elastic_ray.state.layout import ReplicasDifferError
from elastic_ray.sync import LocalSGD, PairAveraging
from tests.loop.ranks import Ranks
from tests.sync.drifting import adam, plain

BATCH, PERIOD, ROUNDS = 4, 4, 3
WAIT_S = 20.0


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    """Rows in an order that a rank may change."""

    order: ClassVar[list[int]] = list(range(BATCH * PERIOD * ROUNDS))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((5,), float(self.order[index]))


def train(strategy: Any, make: Any, inside: Any, seed: int = 0) -> nn.Module:
    """Two epochs; ``inside(epoch, step, data)`` is called before each epoch (step -1) and after each step."""
    model = nn.Linear(5, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer, data = make(model), Numbered()
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategy)
    loader = er.AdaptiveDataLoader(data, batch_size=BATCH, seed=seed)
    for epoch in er.remaining_epochs_until(2):
        inside(epoch, -1, data)
        for step, x in enumerate(loader):
            optimizer.zero_grad()
            (wrapped(x) / 1e3).square().mean().backward()
            optimizer.step()
            inside(epoch, step, data)
    return model


def counts(strategy: Any, make: Any) -> dict[str, int]:
    """Collectives of the second epoch, by connections."""
    found: Counter[str] = Counter()

    def counting(known: Any, of: str) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            found[of] += 1
            return known(*args, **options)

        return counted

    for group in (communicator.Communicator, communicator.GradientGroup):
        for name in ("all_reduce", "broadcast"):
            setattr(group, name, counting(getattr(group, name), group.__name__))
    ends: list[Counter[str]] = []
    train(strategy, make, lambda epoch, step, data: ends.append(found.copy()) if step < 0 else None)
    return dict(found - ends[1])


@pytest.mark.parametrize(
    ("strategy", "make", "gradient_group"),
    [
        (LocalSGD(period=PERIOD), plain, ROUNDS),
        (LocalSGD(period=PERIOD), adam, ROUNDS + 1),  # moments at the end
        (LocalSGD(period=PERIOD + 1), plain, ROUNDS),  # the last round is no average's, but the mean of the end
        (PairAveraging(period=PERIOD), plain, 1),
    ],
)
def test_an_epoch_has_one_vote_a_round(ranks: Ranks, strategy: Any, make: Any, gradient_group: int) -> None:
    for found in ranks.run(counts, strategy, make, world=2):
        # One more beside the votes compares the data; nobody waits for it.
        assert found == {"Communicator": ROUNDS + 1, "GradientGroup": gradient_group}


def late(folder: Path) -> bool:
    """True if rank 0 has come through its round before rank 1 comes to the epoch."""
    through, rank, found = folder / "through", er.get_context().get_world_rank, [True]

    def inside(epoch: int, step: int, data: Numbered) -> None:
        if epoch == 1 and rank() == 0 and step == PERIOD - 2:
            through.touch()
        until_s = time.monotonic() + WAIT_S
        while epoch == 1 and rank() == 1 and step < 0 and not through.exists():
            if time.monotonic() > until_s:
                found[0] = False
                break
            time.sleep(0.01)  # until the other one has written it

    train(LocalSGD(period=PERIOD), plain, inside)
    return found[0]


def test_nobody_waits_before_a_pass_for_a_late_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(late, tmp_path, world=2) == [True, True]


def differing(give_back: bool, samples: int) -> tuple[str, int]:
    """What a rank is told that has so many samples from the second epoch on, or, for 0, another seed from the first."""
    rank, made = er.get_context().get_world_rank, [0]

    def inside(epoch: int, step: int, data: Numbered) -> None:
        made[0] = 1 + step
        if epoch and step < 0 and rank():
            data.order = list(range(samples))

    try:
        train(LocalSGD(period=PERIOD, give_back=give_back), plain, inside, seed=0 if samples else rank())
    except ReplicasDifferError as error:
        return str(error), made[0]
    return "", made[0]


@pytest.mark.parametrize("give_back", [False, True])
@pytest.mark.parametrize("samples", [0, 9, 90])
def test_other_data_is_named_before_a_round_counts(ranks: Ranks, give_back: bool, samples: int) -> None:
    for text, made in ranks.run(differing, give_back, samples, world=2):
        assert text.startswith("every worker must train on the same data in the same order, but"), text
        assert made <= 2 * PERIOD, "a rank may make the steps of the other one"
