"""Shapes of loops: evaluation after and within training, break, several passes, samplers, worker processes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler, get_worker_info

import elastic_ray as er
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.loop.api import current_session
from elastic_ray.membership.messages import SetBatch
from tests.loop.ranks import Ranks

WORLDS = [None, 2, 3]


def each(ranks: Ranks, world: int | None, function: Any, *args: Any) -> list[Any]:
    """Results of one process or of several, as a list."""
    found = ranks.run(function, *args, world=world)
    return [found] if world is None else list(found)


def numbers(count: int) -> TensorDataset:
    """0..count-1."""
    return TensorDataset(torch.arange(count))


class Trainee:
    """A model that a loop may train on any batch."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.wrapped = er.AdaptiveDataParallel(self.model, self.optimizer)

    def train(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.wrapped(x.float()[:, None] / 10).square().mean().backward()
        self.optimizer.step()

    def state(self) -> list[float]:
        return [p.item() for p in self.model.parameters()]


# -- evaluation and sums -------------------------------------------------------------------------------------


def evaluated(nested: bool) -> dict[str, Any]:
    """Train on 21 samples, evaluate 11: after each epoch, or within every second step too."""
    trainee = Trainee()
    loader = er.AdaptiveDataLoader(numbers(21), batch_size=6)
    evaluation = er.AdaptiveDataLoader(numbers(11), batch_size=4, shuffle=False)
    sums, trained = [], []

    def evaluate() -> None:
        totals = er.Accumulator()
        with torch.no_grad():
            for (x,) in evaluation:
                trainee.wrapped(x.float()[:, None])
                totals["sum"] += x.sum().item()
                totals["count"] += len(x)
        sums.append((totals["sum"], totals["count"]))

    for _ in er.remaining_epochs_until(2):
        seen = er.Accumulator()
        for number, (x,) in enumerate(loader):
            trainee.train(x)
            seen["sum"] += x.sum().item()
            seen["squares"] += x.square().sum().item()
            if nested and number % 2:
                evaluate()
        evaluate()
        trained.append(dict(seen))
    return {"sums": sums, "trained": trained, "steps": current_session().progress.steps, "state": trainee.state()}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_evaluation_passes_and_sums_are_exact(ranks: Ranks, world: int | None, nested: bool) -> None:
    for result in each(ranks, world, evaluated, nested):
        assert set(result["sums"]) == {(55.0, 11.0)}
        assert len(result["sums"]) == (6 if nested else 2)
        assert result["trained"] == [{"sum": 210.0, "squares": 2870.0}] * 2
        assert result["steps"] == 8


# -- break ---------------------------------------------------------------------------------------------------


def broken_off(where: str) -> dict[str, Any]:
    """Leave the training pass, or a nested evaluation, in its third step; go on with the next epoch."""
    trainee = Trainee()
    loader = er.AdaptiveDataLoader(numbers(30), batch_size=6)
    evaluation = er.AdaptiveDataLoader(numbers(12), batch_size=3, shuffle=False)
    steps, totals = [], er.Accumulator()
    for _ in er.remaining_epochs_until(3):
        count = 0
        for (x,) in loader:
            trainee.train(x)
            totals["samples"] += len(x)
            count += 1
            for number, (y,) in enumerate(evaluation):
                totals["evaluated"] += len(y)
                if where != "train" and number == 1:
                    break
            if where != "evaluation" and count == 3:
                break
        steps.append(count)
    return {"steps": steps, "totals": dict(totals), "committed": current_session().progress.steps}


@pytest.mark.parametrize(
    ("where", "count", "samples", "evaluated_samples"),
    [("train", 3, 54, 108), ("evaluation", 5, 90, 90), ("both", 3, 54, 54)],
)
@pytest.mark.parametrize("world", WORLDS)
def test_a_pass_left_by_break_counts_what_it_has_done(
    ranks: Ranks, world: int | None, where: str, count: int, samples: int, evaluated_samples: int
) -> None:
    for result in each(ranks, world, broken_off, where):
        assert result["steps"] == [count] * 3
        assert result["totals"] == {"samples": samples, "evaluated": evaluated_samples}
        assert result["committed"] == 3 * count


# -- passes --------------------------------------------------------------------------------------------------


def passes(_: int) -> list[list[list[int]]]:
    """Two passes over the same loader in each of two epochs, one of them inside a step of the first."""
    trainee = Trainee()
    loader = er.AdaptiveDataLoader(numbers(10), batch_size=4)
    found = []
    for _epoch in er.remaining_epochs_until(2):
        first: list[int] = []
        second: list[int] = []
        inner: list[int] = []
        for number, (x,) in enumerate(loader):
            trainee.train(x)
            first += x.tolist()
            if number == 1:
                inner += [value for (y,) in loader for value in y.tolist()]
        for (x,) in loader:
            second += x.tolist()
        found.append([first, second, inner])
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_passes_over_one_loader_each_see_every_sample(ranks: Ranks, world: int | None) -> None:
    results = each(ranks, world, passes, 0)
    for epoch, which in itertools.product(range(2), range(3)):
        seen = [value for result in results for value in result[epoch][which]]
        assert sorted(seen) == list(range(10)), (epoch, which)
        assert seen != sorted(seen)
    if world is None:
        assert results[0][0][0] == results[0][0][1] == results[0][0][2] != results[0][1][0]


def plain_epochs(_: int) -> list[list[int]]:
    """A loop without `remaining_epochs_until`, as it is before a program becomes elastic."""
    trainee = Trainee()
    loader = er.AdaptiveDataLoader(numbers(12), batch_size=4)
    found = []
    for _epoch in range(3):
        seen: list[int] = []
        for (x,) in loader:
            trainee.train(x)
            seen += x.tolist()
        found.append(seen)
    return found


@pytest.mark.parametrize("world", [None, 2])
def test_a_plain_loop_has_another_order_in_each_pass(ranks: Ranks, world: int | None) -> None:
    results = each(ranks, world, plain_epochs, 0)
    orders = [[value for result in results for value in result[epoch]] for epoch in range(3)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def zipped(_: int) -> None:
    """Two loaders side by side."""
    first, second = er.AdaptiveDataLoader(numbers(12), batch_size=4), er.AdaptiveDataLoader(numbers(12), batch_size=4)
    for _epoch in er.remaining_epochs_until(1):
        for _pair in zip(first, second, strict=True):
            pass


def test_interleaved_loaders_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="nested but not interleaved"):
        ranks.run(zipped, 0)


def dropped(_: int) -> tuple[int, list[int]]:
    """A last batch that is left out."""
    loader = er.AdaptiveDataLoader(numbers(14), batch_size=4, drop_last=True)
    counts = []
    for _epoch in er.remaining_epochs_until(2):
        totals = er.Accumulator()
        for (x,) in loader:
            totals["count"] += len(x)
        counts.append(int(totals["count"]))
    return len(loader), counts


@pytest.mark.parametrize("world", WORLDS)
def test_drop_last_drops_the_tail_of_the_whole(ranks: Ranks, world: int | None) -> None:
    for result in each(ranks, world, dropped, 0):
        assert result == (3, [12, 12])


# -- DataLoader's arguments ----------------------------------------------------------------------------------


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
                session.membership.post(SetBatch(generation=session.membership.generation, batch=wish))
            trainee.train(torch.tensor(indices))
            pids += processes
            seen.append(indices)
            sizes.append(len(indices))
    return {"pids": sorted(set(pids)), "seen": seen, "sizes": sizes, "own": os.getpid()}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("world", [None, 2])
def test_worker_processes_survive_a_change_of_the_batch(ranks: Ranks, world: int | None, persistent: bool) -> None:
    results = each(ranks, world, fetched, persistent)
    counted = Counter(value for result in results for batch in result["seen"] for value in batch)
    assert counted == {2 * index: 2 for index in range(48)}
    for result in results:
        assert len(result["pids"]) == (2 if persistent else 4), "two for each pass, whatever happens in it"
        assert result["own"] not in result["pids"]
        assert result["sizes"][:2] == [6 // len(results), 8]


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


def streamed(_: int) -> tuple[list[int], list[float]]:
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
    loader = er.AdaptiveDataLoader(er.ArrowDataset(path), batch_size=8)
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


# -- buffers and context -------------------------------------------------------------------------------------


def normalised(_: int) -> list[dict[str, torch.Tensor]]:
    """BatchNorm's buffers before, between and after three epochs, the second left by break."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(numbers(32), batch_size=8)
    found = []
    for epoch in er.remaining_epochs_until(3):
        found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x.float()[:, None]).square().mean().backward()
            optimizer.step()
            if epoch == 1:
                break
    found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    return found


def test_buffers_are_equal_after_each_epoch(ranks: Ranks) -> None:
    first, second = ranks.run(normalised, 0, world=2)
    for mine, theirs in zip(first[1:], second[1:], strict=True):
        assert mine["1.running_mean"].abs().sum() > 0
        for name, buffer in mine.items():
            assert torch.equal(buffer, theirs[name]), name


def contexts(_: int) -> tuple[Any, ...]:
    """What the context says within an epoch."""
    loader = er.AdaptiveDataLoader(numbers(8), batch_size=4)
    found: tuple[Any, ...] = ()
    for _epoch in er.remaining_epochs_until(1):
        for _batch in loader:
            c = er.get_context()
            found = (
                c.get_world_size(),
                c.get_world_rank(),
                c.get_local_rank(),
                c.get_local_world_size(),
                c.get_node_rank(),
                er.current_epoch(),
            )
    return found


def test_the_context_tells_the_group(ranks: Ranks) -> None:
    assert ranks.run(contexts, 0) == (1, 0, 0, 1, 0, 0)
    assert ranks.run(contexts, 0, world=2) == [(2, 0, 0, 2, 0, 0), (2, 1, 1, 2, 0, 0)]


SCRIPT = """
import os, torch, elastic_ray as er
from torch import nn
data = torch.utils.data.TensorDataset(torch.arange(12.0)[:, None])
torch.manual_seed(0)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model = er.AdaptiveDataParallel(model, optimizer)
loader = er.AdaptiveDataLoader(data, batch_size=6)
for epoch in er.remaining_epochs_until(2):
    totals = er.Accumulator()
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        totals["sum"] += x.sum().item()
line = f"DONE {er.get_context().get_world_size()} {totals['sum']} {model.module.weight.item():.6f}\\n"
os.write(1, line.encode())  # in one piece: the ranks share one pipe
"""


@pytest.mark.slow
def test_one_file_runs_alone_and_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    own = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = []
    for arguments in ([], torchrun):
        done = subprocess.run(
            [sys.executable, *arguments, str(script)], env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        printed.append([line.split() for line in done.stdout.splitlines() if line.startswith("DONE")])
    assert len(printed[0]) == 1
    assert [line[1] for line in printed[0] + printed[1]] == ["1", "2", "2"]
    assert {tuple(line[2:]) for line in printed[0] + printed[1]} == {("66.0", printed[0][0][3])}
