"""DataLoader's options under a group: worker processes, samplers, streams and files."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, WeightedRandomSampler, get_worker_info

import elastic_ray as er
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.data.arrow import ArrowDataset
from elastic_ray.loop.api import current_session
from elastic_ray.membership.messages import BatchProposal
from tests.loop.ranks import Ranks
from tests.loop.trainee import WORLDS, Trainee, each, numbers


class WithPid(torch.utils.data.Dataset[Any]):
    """Samples that tell which process fetched them."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid() if get_worker_info() else 0


def doubled(items: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """A collate function."""
    return [2 * index for index, _ in items], [pid for _, pid in items]


def fetched(persistent: bool) -> dict[str, Any]:
    """Two epochs through two worker processes; the batch grows in the first."""
    loader = er.AdaptiveDataLoader(
        WithPid(), batch_size=6, num_workers=2, collate_fn=doubled, persistent_workers=persistent
    )
    loader.autoscale_batch_size(48)
    session = current_session()
    trainee = Trainee()
    pids, seen, sizes = [], [], []
    for _epoch in er.remaining_epochs_until(2):
        for indices, processes in loader:
            if session.rank == 0:
                wish = BatchChoice(atomic_bsz=8)
                session.membership.post(BatchProposal(generation=session.membership.generation, batch=wish))
            trainee.train(torch.tensor(indices))
            pids += processes
            seen.append(indices)
            sizes.append(len(indices))
    return {"pids": sorted(set(pids)), "seen": seen, "sizes": sizes, "own": os.getpid()}


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("world", [None, 2])
def test_worker_processes_survive_a_change_of_the_batch(ranks: Ranks, world: int | None, persistent: bool) -> None:
    results = each(ranks, world, fetched, persistent)
    counted = Counter(value for result in results for batch in result["seen"] for value in batch)
    assert counted == {2 * index: 2 for index in range(48)}
    for result in results:
        assert len(result["pids"]) == (2 if persistent else 4), "two for each pass, whatever happens in it"
        assert result["own"] not in result["pids"]
        assert result["sizes"][:2] == [6 // (world or 1), 8], "the batch of the second step is another"


def sampled(kind: str) -> tuple[list[int], int]:
    """One epoch with a sampler."""
    data = numbers(20)
    samplers: dict[str, Any] = {
        "weighted": WeightedRandomSampler([1.0] * 5 + [0.0] * 15, num_samples=12),
        "distributed": DistributedSampler(data, num_replicas=5, rank=2, shuffle=True, seed=4, drop_last=True),
        "list": [3, 1, 4, 1, 5, 9, 2, 6],
    }
    loader = er.AdaptiveDataLoader(data, batch_size=6, sampler=samplers[kind])
    seen = []
    for _ in er.remaining_epochs_until(1):
        for (x,) in loader:
            seen += x.tolist()
    return seen, len(loader)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["weighted", "distributed", "list"])
def test_samplers_order_the_whole(ranks: Ranks, kind: str) -> None:
    alone, length = ranks.run(sampled, kind)
    together = ranks.run(sampled, kind, world=2)
    assert sorted(alone) == sorted(value for seen, _ in together for value in seen)
    assert length == together[0][1] == -(-len(alone) // 6) if kind != "distributed" else length == 3
    if kind == "weighted":
        assert len(alone) == 12
        assert set(alone) <= set(range(5))
    elif kind == "distributed":
        assert len(alone) == len(set(alone)) == 18  # its drop_last, not its shards
    else:
        assert alone == [3, 1, 4, 1, 5, 9, 2, 6]


class Stream(IterableDataset[Any]):
    """0..21, without a length."""

    def __iter__(self) -> Any:
        return iter(range(22))


def streamed(_: int) -> tuple[list[tuple[int, Any]], list[float]]:
    """Two epochs of a stream, the second left by break."""
    trainee = Trainee()
    loader = er.AdaptiveDataLoader(Stream(), batch_size=6)
    seen, state = [], []
    for epoch in er.remaining_epochs_until(3):
        for x in loader:
            trainee.train(x)
            seen.append((epoch, x.tolist()))
            if epoch == 1:
                break
        state.append(trainee.state()[0])
    return seen, state


@pytest.mark.parametrize("world", WORLDS)
def test_a_stream_is_shared_out(ranks: Ranks, world: int | None) -> None:
    results = each(ranks, world, streamed, 0)
    for epoch, wanted in ((0, range(22)), (1, range(6)), (2, range(22))):
        assert sorted(v for seen, _ in results for e, values in seen if e == epoch for v in values) == list(wanted)
    assert all(state == results[0][1] for _, state in results)


def from_parquet(path: str) -> list[int]:
    """One epoch of a Parquet file."""
    loader = er.AdaptiveDataLoader(ArrowDataset(path), batch_size=8)
    seen = []
    for _ in er.remaining_epochs_until(1):
        for batch in loader:
            seen += [int(value) for value in batch["x"]]
    return seen


@pytest.mark.parametrize("world", [None, 2])
def test_a_parquet_file_through_the_loader(ranks: Ranks, world: int | None, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": list(range(50))}), tmp_path / "rows.parquet", row_group_size=10)
    results = each(ranks, world, from_parquet, str(tmp_path / "rows.parquet"))
    assert sorted(value for seen in results for value in seen) == list(range(50))


class Ready(torch.utils.data.Dataset[Any]):
    """Its samples come together, as ``collate_fn`` is to have them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        raise AssertionError("samples are asked for together")

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(indices), "twice": 2 * torch.tensor(indices)}


def as_it_is(batch: Any) -> Any:
    return batch


def ready_batches(workers: int) -> list[int]:
    loader = er.AdaptiveDataLoader(Ready(), batch_size=4, num_workers=workers, collate_fn=as_it_is)
    found = []
    for _ in er.remaining_epochs_until(1):
        for batch in loader:
            assert batch["twice"].tolist() == (2 * batch["x"]).tolist()
            found += batch["x"].tolist()
    return sorted(found)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_may_give_whole_batches(ranks: Ranks, workers: int) -> None:
    assert ranks.run(ready_batches, workers) == list(range(12))
