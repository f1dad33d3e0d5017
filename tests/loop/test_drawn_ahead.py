"""Loops that draw a batch before they train on the one before: a lost step would lose the earlier batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import elastic_ray as er
from tests.loop.changing import run_job
from tests.loop.ranks import RankFailedError, Ranks

Train = Callable[[Any], None]


def prefetched(loader: Any, train: Train) -> None:
    """As NVIDIA's data_prefetcher: the next batch is on its way to the device while one is trained on."""
    batches = iter(loader)
    ahead = next(batches, None)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        train(batch[0])


def copied(loader: Any, train: Train) -> None:
    """The same with copies, as on a device."""
    prefetched(loader, lambda x: train(x.clone()))


def in_groups(loader: Any, train: Train) -> None:
    """As Hugging Face's get_batch_samples: some batches, to count their tokens, and then the model on parts of each."""
    batches = iter(loader)
    while group := list(itertools.islice(batches, 2)):
        for (x,) in group:
            train(x[:, :1])


def without_the_first(loader: Any, train: Train) -> None:
    """A batch may be left out."""
    for number, (x,) in enumerate(loader):
        if number:
            train(x)


def loop(way: Callable[[Any, Train], None], collate: Any = None) -> int:
    """Train an epoch; return the number of updates."""
    model = torch.nn.Linear(1, 1) if way is in_groups else torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(TensorDataset(torch.ones(16, 2)), batch_size=4, collate_fn=collate)
    updates = 0

    def train(x: torch.Tensor) -> None:
        nonlocal updates
        optimizer.zero_grad()
        wrapped(x).sum().backward()
        optimizer.step()
        updates += 1

    for _ in er.remaining_epochs_until(1):
        way(loader, train)
    return updates


_ALWAYS = torch.ones(2, 2)


def always(samples: Any) -> tuple[torch.Tensor]:
    """Return a tensor that is in each batch."""
    return (_ALWAYS,)


@pytest.mark.parametrize("way", [prefetched, in_groups])
@pytest.mark.parametrize("first", [(1,), (1, 2)])
def test_a_job_names_the_way_out(way: Any, first: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"has drawn a later one.*Train on each batch before the next is drawn"):
        run_job(lambda: loop(way), first=first)


@pytest.mark.parametrize("way", [prefetched, in_groups, copied])
def test_so_do_several_ranks_and_one_alone_goes_on(ranks: Ranks, way: Any) -> None:
    with pytest.raises(RankFailedError, match="Train on each batch before the next is drawn"):
        ranks.run(loop, way, world=2)
    assert ranks.run(loop, way) == 4


@pytest.mark.parametrize("collate", [None, always])
def test_a_batch_may_be_left_out(collate: Any) -> None:
    assert run_job(lambda: loop(without_the_first, collate), first=(1, 2)).results == {1: 3, 2: 3}
