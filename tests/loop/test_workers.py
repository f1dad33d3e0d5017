"""What DataLoader workers see of a dataset that changes between epochs, and what a taken-over DataLoader keeps."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import elastic_ray as er
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.loop.api import current_session
from elastic_ray.membership.messages import BatchProposal
from elastic_ray.run.current import set_session
from tests.loop.ranks import Ranks


@pytest.fixture
def own_server() -> Iterator[None]:
    """DataLoader workers are not forked from this process: Ray may have left threads in it that hold locks."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_forkserver_preload(["torch", __name__])
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


class Redrawn(torch.utils.data.Dataset[Any]):
    """Has nothing to give before `draw` was called, as a dataset of drawn negatives; tells who gave what."""

    def __init__(self) -> None:
        self.drawn: int | None = None
        self.epoch: int | None = None

    def draw(self, epoch: int) -> None:
        self.drawn = epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int, int, int]:
        assert self.drawn is not None, "nothing was drawn yet"
        info = get_worker_info()
        assert info is not None and info.dataset is self
        return index, self.drawn, -1 if self.epoch is None else self.epoch, os.getpid()


def draws(persistent: bool) -> list[Any]:
    """Three epochs whose negatives are drawn by the epoch's own code; the batch changes within each."""
    dataset = Redrawn()
    loader = er.AdaptiveDataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=persistent)
    loader.autoscale_batch_size(6)
    session, found = current_session(), []
    for epoch in er.remaining_epochs_until(3):
        dataset.draw(epoch)
        seen, pids = [], set()
        for number, (index, drawn, told, pid) in enumerate(loader):
            if session.rank == 0:
                wish = BatchChoice(atomic_bsz=1 + number % 3)
                session.membership.post(BatchProposal(generation=session.membership.generation, batch=wish))
            seen += list(zip(index.tolist(), drawn.tolist(), told.tolist(), strict=True))
            pids |= set(pid.tolist())
        found.append((seen, pids))
    return found


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("world", [None, 2])
def test_workers_see_what_the_epoch_s_code_has_drawn(ranks: Ranks, world: int | None, persistent: bool) -> None:
    results = ranks.run(draws, persistent, world=world)
    for result in [results] if world is None else results:
        for epoch, (seen, pids) in enumerate(result):
            drawn, told = (0, epoch) if persistent else (epoch, -1)
            assert {item[1:] for item in seen} == {(drawn, told)}, epoch
            assert len(pids) <= 2, "a resize starts no process"
        started = set.union(*(pids for _, pids in result))
        assert len(started) <= 2 if persistent else len(started) > 2
    indices = [item[0] for result in ([results] if world is None else results) for seen, _ in result for item in seen]
    assert sorted(indices) == sorted(list(range(12)) * 3)


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws from each generator for each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(1).item(), float(np.random.rand()), random.random()  # noqa: NPY002


def augmented(workers: int, whole: bool = False) -> list[Any]:
    """What two epochs draw, by sample."""
    loader = er.AdaptiveDataLoader(Augmented(), batch_size=3, num_workers=workers, shuffle=True, whole_batches=whole)
    return [
        sorted(row for batch in loader for row in zip(*(each.tolist() for each in batch), strict=True))
        for _ in er.remaining_epochs_until(2)
    ]


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_sample_draws_is_independent_of_its_loader(ranks: Ranks, whole: bool) -> None:
    """Nor on the number of workers: it follows from the seed, the epoch and the sample's position."""
    alone = ranks.run(augmented, 1, whole)
    shared = ranks.run(augmented, 2, whole, world=2)
    assert [sorted(shared[0][epoch] + shared[1][epoch]) for epoch in range(2)] == alone
    assert len({draw for epoch in alone for _, *draws in epoch for draw in draws}) == 2 * 12 * 3, "never the same twice"


def test_worker_processes_end_with_their_run(ranks: Ranks) -> None:
    assert ranks.run(kept_loader) == (2, 0)


def kept_loader() -> tuple[int, int]:
    """Worker processes of a loader that somebody still holds, before and after the end of its run."""
    loader = er.AdaptiveDataLoader(Augmented(), batch_size=3, num_workers=2, persistent_workers=True)
    before = set(multiprocessing.active_children())
    for _ in er.remaining_epochs_until(1):
        for _batch in loader:
            pass
    started = set(multiprocessing.active_children()) - before
    current_session().registry.loaders.close()
    assert len(loader) == 4
    return len(started), len(started & set(multiprocessing.active_children()))


class Growing(torch.utils.data.Dataset[Any]):
    """A curriculum that is the dataset's own: longer in each epoch."""

    length = 4

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def grows(workers: int) -> list[tuple[list[int], int]]:
    """The indices of three epochs, and the loader's length in each."""
    dataset = Growing()
    loader = er.AdaptiveDataLoader(dataset, batch_size=4, num_workers=workers)
    found = []
    for epoch in er.remaining_epochs_until(3):
        dataset.length = 4 * (epoch + 1)
        found.append(([x for batch in loader for x in batch.tolist()], len(loader)))
    return found


@pytest.mark.parametrize("world", [None, 2])
def test_a_dataset_may_have_another_length_in_each_epoch(ranks: Ranks, world: int | None) -> None:
    results = ranks.run(grows, 1, world=world)
    results = [results] if world is None else results
    for epoch in range(3):
        assert sorted(x for result in results for x in result[epoch][0]) == list(range(4 * (epoch + 1)))
        assert {result[epoch][1] for result in results} == {epoch + 1}


@pytest.mark.usefixtures("own_server")
def test_worker_processes_go_with_the_loader() -> None:
    set_session(None)
    loader = er.AdaptiveDataLoader(numbers(8), batch_size=4, num_workers=1, persistent_workers=True)
    before = set(multiprocessing.active_children())
    assert len(list(loader)) == 2
    (worker,) = set(multiprocessing.active_children()) - before
    gc.disable()
    try:
        del loader
        worker.join(timeout=30.0)
        assert not worker.is_alive()
    finally:
        gc.enable()


# -- a DataLoader in place of a dataset ----------------------------------------------------------------------


def numbers(count: int) -> TensorDataset:
    """0..count-1."""
    return TensorDataset(torch.arange(count))


def doubled(items: list[Any]) -> torch.Tensor:
    """A collate function."""
    return 2 * torch.stack([x for (x,) in items])


def of(loader: DataLoader[Any], **options: Any) -> er.AdaptiveDataLoader:
    """The loader of a session of its own."""
    set_session(None)
    return er.AdaptiveDataLoader(loader, **options)


@pytest.mark.usefixtures("own_server")
def test_a_data_loader_is_taken_over() -> None:
    given = DataLoader(
        numbers(10), batch_size=4, shuffle=True, num_workers=2, collate_fn=doubled, drop_last=True, prefetch_factor=3
    )
    loader = of(given)
    for name in ("dataset", "batch_size", "num_workers", "collate_fn", "drop_last", "prefetch_factor", "pin_memory"):
        assert getattr(loader, name) == getattr(given, name), name
    batches = [batch.tolist() for batch in loader]
    assert [len(batch) for batch in batches] == [4, 4]
    assert all(x % 2 == 0 for batch in batches for x in batch)
    assert len(loader) == len(given)


def test_the_order_of_a_data_loader_is_kept() -> None:
    values = [x for (batch,) in of(DataLoader(numbers(9), batch_size=4)) for x in batch.tolist()]
    assert values == list(range(9)), "shuffle is False where nobody has asked for it"
    values = [x for (batch,) in of(DataLoader(numbers(9), batch_size=4, shuffle=True)) for x in batch.tolist()]
    assert sorted(values) == list(range(9)) != values
    values = [x for (batch,) in of(DataLoader(numbers(9), batch_size=4, sampler=[5, 3, 1])) for x in batch.tolist()]
    assert values == [5, 3, 1]
    weighted = WeightedRandomSampler([0.0] * 8 + [1.0], num_samples=3)
    assert [x for (batch,) in of(DataLoader(numbers(9), sampler=weighted)) for x in batch.tolist()] == [8, 8, 8]
    cut = BatchSampler(SequentialSampler(numbers(5)), 2, drop_last=False)
    whole = of(DataLoader(numbers(5), batch_sampler=cut), whole_batches=True)
    assert [batch.tolist() for (batch,) in whole] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        (DataLoader(numbers(5), batch_size=None), {}, "batch_size=None"),
        (DataLoader(numbers(5), batch_sampler=[[0, 1], [2]]), {}, "whole_batches=True"),
        (DataLoader(numbers(5), shuffle=True, generator=torch.Generator()), {}, "pass seed="),
        (DataLoader(numbers(5)), {"batch_size": 3}, "batch_size cannot be given beside a DataLoader"),
        (DataLoader(numbers(5)), {"collate_fn": doubled}, "collate_fn cannot be given beside a DataLoader"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(loader: DataLoader[Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        of(loader, **options)


def test_a_loader_shows_what_a_data_loader_shows() -> None:
    set_session(None)
    loader = er.AdaptiveDataLoader(numbers(6), 4)
    assert isinstance(loader.sampler, RandomSampler)
    assert isinstance(er.AdaptiveDataLoader(numbers(6), shuffle=False).sampler, SequentialSampler)
    ours = {name: getattr(loader, name) for name in ("batch_size", "num_workers", "collate_fn", "drop_last")}
    assert ours == {"batch_size": 4, "num_workers": 0, "collate_fn": default_collate, "drop_last": False}
    plain = DataLoader(numbers(6))
    for name in ("pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor"):
        assert getattr(loader, name) == getattr(plain, name), name
    with pytest.raises(AttributeError, match="no attribute 'steps'"):
        _ = loader.steps


@pytest.mark.parametrize("world", [None, 2])
def test_a_batch_may_be_larger_than_the_dataset(ranks: Ranks, world: int | None) -> None:
    results = ranks.run(all_at_once, 0, world=world)
    results = [results] if world is None else results
    assert sorted(x for seen, _ in results for x in seen) == list(range(5))
    assert {length for _, length in results} == {1}


def all_at_once(_: int) -> tuple[list[int], int]:
    """One epoch of a dataset smaller than the batch."""
    loader = er.AdaptiveDataLoader(numbers(5), batch_size=64)
    seen = []
    for _epoch in er.remaining_epochs_until(1):
        for (x,) in loader:
            seen += x.tolist()
    return seen, len(loader)
