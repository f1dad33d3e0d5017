"""What must be the same on every worker, and is not: the error names it, where a group begins or a worker joins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.state.layout import ReplicasDifferError, check_samples
from tests.loop.changing import Change, run_job
from tests.loop.counter import Counter


class Program:
    """A loop of which each worker, in the order in which they start, has its own samples and states.

    Args:
        samples: of each worker's dataset.
        states: names of what each registers.
    """

    def __init__(self, samples: Sequence[int] = (24,), states: Sequence[Sequence[str]] = ((),)) -> None:
        self._samples, self._states = itertools.cycle(samples), itertools.cycle(states)
        self.steps = 0

    def __call__(self) -> int:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(float(next(self._samples)))[:, None]), batch_size=6)
        for name in next(self._states):
            er.register_state(name, Counter())
        for _ in er.remaining_epochs_until(2):
            for (x,) in loader:
                optimizer.zero_grad()
                wrapped(x / 10).square().mean().backward()
                optimizer.step()
                self.steps += 1
        return er.get_context().get_global_step()


def test_datasets_of_other_lengths_are_error_before_first_step() -> None:
    program = Program(samples=(24, 30))
    with pytest.raises(ReplicasDifferError, match="has 24 samples on rank 0 and 30 on rank 1"):
        run_job(program, first=(1, 2))
    assert program.steps == 0


def test_joiner_whose_dataset_has_another_length_is_an_error() -> None:
    with pytest.raises(ReplicasDifferError, match="has 24 samples on rank 0 and 23 on rank 1"):
        run_job(Program(samples=(24, 23)), [Change(2, (1, 2))], first=(1,))


class Stream(torch.utils.data.IterableDataset[Any]):
    """Nobody knows how long it is."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(12.0)[:, None])


def test_a_dataset_without_a_length_is_like_any() -> None:
    made = itertools.count()

    def train() -> int:
        model = nn.Linear(1, 1)
        er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        loader = er.AdaptiveDataLoader(Stream() if next(made) else TensorDataset(torch.zeros(12, 1)), batch_size=6)
        return sum(loader.batch_size == 6 for _ in er.remaining_epochs_until(1))

    assert set(run_job(train, first=(1, 2)).results.values()) == {1}


@pytest.mark.parametrize(
    ("samples", "says"),
    [([], ""), ([5], ""), ([5, 5], ""), ([-1, 5, -1, 5], ""), ([-1, 5, 6], "5 .*rank 1 and 6 on rank 2")],
)
def test_lengths_that_are_known_are_compared(samples: list[int], says: str) -> None:
    if not says:
        return check_samples(samples)
    with pytest.raises(ReplicasDifferError, match=says):
        check_samples(samples)
    return None


def test_joiner_that_lacks_a_registered_state_is_told_which() -> None:
    program = Program(states=(("curriculum", "average"), ("average",)))
    with pytest.raises(
        RuntimeError, match=r"the others have user/curriculum, which this joining worker.* the same code"
    ):
        run_job(program, [Change(2, (1, 2))], first=(1,))


def test_a_joiner_that_has_registered_more_is_told_which() -> None:
    with pytest.raises(RuntimeError, match="but the others have no user/curriculum"):
        run_job(Program(states=((), ("curriculum",))), [Change(2, (1, 2))], first=(1,))
