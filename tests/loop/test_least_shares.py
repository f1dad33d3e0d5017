"""BatchNorm cannot be trained with one sample: no worker has a share of one while the model holds such a part."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.data.sharding import split, step_size
from elastic_ray.run.current import session_of_thread
from tests.loop.changing import run_job


def norm_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def train(samples: int, batch_size: int, *, frozen: bool = False, **adapt: Any) -> list[list[int]]:
    """Indices of each micro-batch of this worker."""
    data = TensorDataset(torch.randn(samples, 3, generator=torch.Generator().manual_seed(1)), torch.arange(samples))
    model: Any = norm_net()
    if frozen:
        model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(data, batch_size=batch_size)
    if adapt:
        loader.autoscale_batch_size(**adapt)
    seen = []
    for _ in er.remaining_epochs_until(1):
        for x, index in loader:
            seen.append(index.tolist())
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    session = session_of_thread()
    assert session is not None and session.ledger.epochs_done == 1
    return seen


@pytest.mark.parametrize(("samples", "batch_size", "workers"), [(23, 10, 4), (9, 4, 1), (13, 6, 3)])
def test_each_sample_is_trained_once_and_none_alone(samples: int, batch_size: int, workers: int) -> None:
    outcome = run_job(lambda: train(samples, batch_size), (), first=tuple(range(1, workers + 1)))
    shares = list(itertools.chain.from_iterable(outcome.results.values()))
    assert sorted(itertools.chain.from_iterable(shares)) == list(range(samples))
    assert min(map(len, shares)) >= 2


def test_where_it_cannot_be_helped_the_error_says_why() -> None:
    with pytest.raises(ValueError, match=r"a step of 2 samples on 2 workers has left this worker one.*drop_last=True"):
        run_job(lambda: train(12, 2), (), first=(1, 2))


def test_frozen_batch_norm_leaves_the_split_as_it_is() -> None:
    outcome = run_job(lambda: train(8, 4, frozen=True), (), first=(1, 2, 3, 4))
    assert all(len(share) == 1 for shares in outcome.results.values() for share in shares)


def test_micro_batches_are_fewer_rather_than_of_one_sample() -> None:
    for count, world, micros in itertools.product(range(1, 30), range(1, 6), range(1, 4)):
        sizes = split(count, world_size=world, micro_steps=micros, least=2)
        assert sizes.sum() == count and sizes.min() >= (2 if count >= 2 * world else 1 if count >= world else 0)


def test_one_worker_alone_leaves_the_last_step_two() -> None:
    sizes = [step_size(position=p, total=9, batch_size=4, world_size=1, least=2) for p in (0, 4, 7)]
    assert sizes == [4, 3, 2]
