"""The order of an epoch is the same on every rank, whoever asks for it and whatever the sampler is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from elastic_ray.data.order import (
    EpochOrder,
    IndexOrder,
    SamplerOrder,
    digest,
    drops_last,
    order_for,
)
from elastic_ray.data.private_random import PrivateRandom

DATASET = TensorDataset(torch.arange(40))


class Dice(Sampler[int]):
    """A sampler that draws from every kind of generator there is, its own and the global ones."""

    def __init__(self) -> None:
        self.own = [0]
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(2)
        self.legacy = np.random.RandomState(3)
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        for _ in range(3):
            yield self.python.randrange(40)
            yield int(self.numpy.integers(40))
            yield int(self.legacy.randint(40))
            yield int(torch.randint(40, (1,), generator=self.generator))
            yield random.randrange(40)
            yield int(np.random.randint(40))  # noqa: NPY002  (what users' samplers do)
            yield int(torch.randint(40, (1,)))


SAMPLERS = {
    "random": lambda: RandomSampler(DATASET),
    "replacement": lambda: RandomSampler(DATASET, replacement=True, num_samples=100),
    "own generator": lambda: RandomSampler(DATASET, generator=torch.Generator().manual_seed(random.randrange(99))),
    "weighted": lambda: WeightedRandomSampler(torch.arange(40).double(), 60),
    "subset": lambda: SubsetRandomSampler(range(5, 25)),
    "dice": Dice,
    "list": lambda: [3, 1, 2, 1],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_newcomer_reads_the_same_order(name: str) -> None:
    veteran = order_for(DATASET, sampler=SAMPLERS[name]())
    for epoch in range(3):
        seen = veteran.epoch_order(7, epoch)
        torch.rand(epoch + 3), random.random(), np.random.rand()  # noqa: NPY002  (ranks differ outside)
    newcomer = order_for(DATASET, sampler=SAMPLERS[name]())
    again = newcomer.epoch_order(7, 2)
    np.testing.assert_array_equal(seen, again)
    assert digest(seen) == digest(again)
    assert seen.dtype == np.int64  # type: ignore[attr-defined]
    if name != "list":
        assert digest(newcomer.epoch_order(7, 3)) != digest(again) != digest(newcomer.epoch_order(8, 2))


def test_the_training_never_notices_the_draw() -> None:
    sampler = Dice()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002

    def draw() -> list[Any]:
        return [torch.rand(1).item(), random.random(), np.random.rand(), sampler.python.random()]  # noqa: NPY002

    state = torch.get_rng_state(), random.getstate(), np.random.get_state(), sampler.python.getstate()  # noqa: NPY002
    expected = draw()
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])  # noqa: NPY002
    sampler.python.setstate(state[3])
    SamplerOrder(sampler, samples=40).epoch_order(0, 0)
    assert draw() == expected


def test_private_random_goes_on_where_it_was_left() -> None:
    straight, parted = PrivateRandom(seed=1, epoch=2), PrivateRandom(seed=1, epoch=2)
    with straight:
        expected = [random.random(), random.random()]
    with parted:
        got = [random.random()]
    random.random()
    with parted:
        got.append(random.random())
    assert got == expected


def test_shuffled_and_plain_index_orders() -> None:
    order = order_for(DATASET)
    assert isinstance(order, EpochOrder)
    first, second = order.epoch_order(0, 0), order.epoch_order(0, 1)
    assert sorted(first[:]) == sorted(second[:]) == list(range(40))
    assert digest(first) != digest(second)
    np.testing.assert_array_equal(order_for(DATASET, shuffle=False).epoch_order(0, 0)[:], np.arange(40))


def test_distributed_sampler_gives_its_shuffle_and_seed_not_shards() -> None:
    sampler = DistributedSampler(DATASET, num_replicas=4, rank=1, seed=5, drop_last=True)
    order = order_for(DATASET, sampler=sampler)
    np.testing.assert_array_equal(order.epoch_order(0, 1)[:], IndexOrder(samples=40).epoch_order(5, 1)[:])
    assert drops_last(sampler, drop_last=False)
    assert not drops_last(None, drop_last=False)
    plain = DistributedSampler(DATASET, num_replicas=4, rank=1, shuffle=False)
    np.testing.assert_array_equal(order_for(DATASET, sampler=plain).epoch_order(0, 1)[:], np.arange(40))


def test_set_epoch_is_called_and_dataset_may_bring_order() -> None:
    class Reversing:
        epochs: list[int] = []  # noqa: RUF012

        def __len__(self) -> int:
            return 4

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter(torch.tensor([3, 2, 1, 0]))

        def epoch_order(self, seed: int, epoch: int) -> Any:
            return np.array([1, 0, 3, 2])

    assert order_for(DATASET, sampler=Reversing()).epoch_order(0, 6).tolist() == [3, 2, 1, 0]  # type: ignore[attr-defined]
    assert Reversing.epochs == [6]
    assert order_for(Reversing()).epoch_order(0, 0).tolist() == [1, 0, 3, 2]  # type: ignore[attr-defined]
    assert order_for(Reversing(), shuffle=False).epoch_order(0, 0)[:].tolist() == [0, 1, 2, 3]


class OwnShards(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([0])


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        (iter([1, 2]), TypeError, "one-time iterator"),
        (5, TypeError, "must be iterable, but got int"),
        (BatchSampler(SequentialSampler(DATASET), 4, False), TypeError, "pass the sampler inside it"),
        ([], ValueError, "gave none"),
        ([0, 40], ValueError, r"in 0\.\.39, .* gave 0\.\.40"),
        ([0.5], TypeError, "gave 0.5, a float"),
        (OwnShards(DATASET, num_replicas=2, rank=0), TypeError, "fixed number of ranks"),
        (DistributedSampler(range(9), num_replicas=2, rank=0), ValueError, "dataset of 40 samples.* has 9"),
    ],
)
def test_samplers_that_cannot_work_say_why(sampler: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        order_for(DATASET, sampler=sampler).epoch_order(0, 0)


def test_datasets_that_cannot_work_say_why() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    with pytest.raises(ValueError, match="at least 1 sample, but has 0"):
        order_for([])
    with pytest.raises(TypeError, match="Endless has no __len__"):
        order_for(Endless())
