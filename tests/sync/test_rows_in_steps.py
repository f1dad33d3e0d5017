"""Tables under Rows in all kinds of steps: accumulated, clipped, scaled, lost, of several models."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.sync import Parallax
from elastic_ray.sync.tables import rows_operation as operation
from elastic_ray.sync.tables.row_bucket import RowBucket
from tests.loop.changing import Change, Kill, run_job
from tests.loop.ranks import Ranks, leave_torch_group
from tests.sync import tables
from tests.sync.tables import Case, adagrad, adam, assert_same_update, by_torch, elastic, momentum, parameters, sgd

SPARSE, DENSE = Case(tables.OneTable, sgd, True), Case(tables.OneTable, sgd, False)


def many(function: str, *calls: tuple[Any, ...]) -> list[Any]:
    """Several calls in one group, one after the other."""
    return [globals()[function](*call) for call in calls]


@pytest.mark.parametrize("world", [None, 2])
def test_accumulated_gradients_give_the_same_steps(ranks: Ranks, world: Any) -> None:
    batch = 8 if world else 9
    cases = [SPARSE, DENSE, Case(tables.BySome, momentum, True), Case(tables.BySome, adam, False),
             Case(tables.Tied, sgd, True), Case(tables.Many, sgd, False), Case(tables.Many, sgd, True)]  # fmt: skip
    results = ranks.run(many, "elastic", *((case, 3 if world is None else 2, batch) for case in cases), world=world)
    for result in results if world else [results]:
        for case, found in zip(cases, result, strict=True):
            assert_same_update(case, found, by_torch(case, world or 1, batch), 1e-3 if case.sparse else 1e-5)


@pytest.mark.parametrize("case", [DENSE, Case(tables.OneTable, adagrad, True, "dense")], ids=lambda case: case.name)
def test_clipping_sees_the_mean_gradient(ranks: Ranks, case: Case) -> None:
    wanted = by_torch(case, 2, clip=0.05)
    for found in ranks.run(elastic, case, None, tables.BATCH, 0.05, world=2):
        assert_same_update(case, found, wanted, 1e-5)


def torch_clips_sparse_gradients() -> bool:
    """True if this torch has norms of sparse tensors, as 2.14 and 2.15 do."""
    try:
        torch.linalg.vector_norm(torch.eye(2).to_sparse())
    except NotImplementedError:
        return False
    return True


def test_sparse_gradients_are_clipped_or_refused(ranks: Ranks) -> None:
    if not torch_clips_sparse_gradients():
        with pytest.raises(NotImplementedError, match="linalg_vector_norm"):
            ranks.run(elastic, SPARSE, None, tables.BATCH, 0.05)
        return
    wanted = by_torch(SPARSE, 2, clip=0.05)
    for found in ranks.run(elastic, SPARSE, None, tables.BATCH, 0.05, world=2):
        assert_same_update(SPARSE, found, wanted, 1e-3)


@pytest.mark.slow
def test_four_ranks(ranks: Ranks) -> None:
    cases = [SPARSE, DENSE]
    results = ranks.run(many, "elastic", *((case,) for case in cases), world=4)
    for result in results:
        for case, found, same in zip(cases, result, results[0], strict=True):
            assert_same_update(case, found, by_torch(case, 4), 1e-3 if case.sparse else 1e-5)
            assert all(torch.equal(found[name], same[name]) for name in found)


def ddp(case: Case, batch: int) -> dict[str, Tensor]:
    """Torch DDP on equal shares in our order."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = case.model(sparse=case.sparse)
    optimizer = case.optimizer(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for epoch in range(tables.EPOCHS):
        order = IndexOrder(samples=tables.SAMPLES).epoch_order(3, epoch)[:]
        for start in range(0, tables.SAMPLES - batch + 1, batch):
            share = order[start + rank * batch // world : start + (rank + 1) * batch // world]
            ids, classes = tables.data()[torch.from_numpy(share)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(ids), classes).backward()
            optimizer.step()
    leave_torch_group()
    return parameters(model)


def dropping(case: Case, batch: int) -> dict[str, Tensor]:
    """Our wrappers on equal shares."""
    model = case.model(sparse=case.sparse)
    optimizer = case.optimizer(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=case.strategy)
    loader = er.AdaptiveDataLoader(tables.data(), batch_size=batch, seed=3, drop_last=True)
    for _ in er.remaining_epochs_until(tables.EPOCHS):
        for ids, classes in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(ids), classes).backward()
            optimizer.step()
    return parameters(model)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("case", [SPARSE, DENSE, Case(tables.OneTable, adagrad, True)], ids=lambda case: case.name)
def test_equal_shares_give_ddp_s_parameters(ranks: Ranks, case: Case) -> None:
    theirs = ranks.run(ddp, case, 8, world=2)[0]
    for found in ranks.run(dropping, case, 8, world=2):
        assert_same_update(case, found, theirs, 1e-3 if case.sparse else 1e-5)


def by_hand(case: Case, every: int, synced: int, set_to_none: bool) -> dict[str, Tensor]:
    """Gradients of `every` steps added up, synchronised every `synced` steps."""
    model = case.model(sparse=case.sparse)
    optimizer = case.optimizer(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=case.strategy)
    loader = er.AdaptiveDataLoader(tables.data(), batch_size=4, seed=3, drop_last=True)
    step = 0
    for _ in er.remaining_epochs_until(tables.EPOCHS):
        for ids, classes in loader:
            step += 1
            with nullcontext() if step % synced == 0 else wrapped.no_sync():
                (nn.functional.cross_entropy(wrapped(ids), classes) / every).backward()
            grad = model.table.weight.grad
            assert grad is not None and grad.is_sparse == case.sparse
            if step % every == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
    return parameters(model)


@pytest.mark.parametrize("world", [None, 2])
def test_gradients_added_up_by_hand(ranks: Ranks, world: Any) -> None:
    calls = [(case, 3, synced, none) for case in (SPARSE, DENSE) for synced in (1, 3) for none in (True, False)]
    results = ranks.run(many, "by_hand", *calls, world=world)
    wanted = ranks.run(by_hand, Case(tables.OneTable, sgd, False, "dense"), 3, 1, True)
    for result in results if world else [results]:
        for (case, *_), found in zip(calls, result, strict=True):
            assert_same_update(case, found, wanted, 1e-3)


def scaled_and_two(sparse: bool, strategy: Any) -> list[dict[str, Tensor]]:
    """AMP's scaler, and a second model after the first."""
    torch.manual_seed(1)
    models = [tables.OneTable(sparse), tables.OneTable(sparse)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    first = er.AdaptiveDataParallel(models[0], optimizers[0], grad_scaler=scaler, strategy=strategy)
    second = er.AdaptiveDataParallel(models[1], optimizers[1], strategy=strategy)
    loader = er.AdaptiveDataLoader(tables.data(), batch_size=7, seed=3)
    for _ in er.remaining_epochs_until(tables.EPOCHS):
        for number, (ids, classes) in enumerate(loader):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(first(ids), classes) * (torch.inf if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizers[0])
            scaler.update()
            nn.functional.cross_entropy(second(ids), classes).backward()
            optimizers[1].step()
    return [parameters(model) for model in models]


@pytest.mark.parametrize("world", [None, 2])
def test_a_scaler_and_several_models(ranks: Ranks, world: Any) -> None:
    wanted = ranks.run(scaled_and_two, False, "all_reduce")
    results = ranks.run(many, "scaled_and_two", *((sparse, Parallax()) for sparse in (True, False)), world=world)
    for result in results if world else [results]:
        for found in result:
            for mine, theirs in zip(found, wanted, strict=True):
                assert_same_update(SPARSE, mine, theirs, 1e-3)


# -- changes of the group ----------------------------------------------------------------------------------------------


def job(case: Case) -> Any:
    """A train function for scripted changes."""

    def train() -> dict[str, Tensor]:
        model = case.build(case.sparse)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
        optimizer = case.optimizer(model)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=case.strategy)
        loader = er.AdaptiveDataLoader(tables.data(), batch_size=8, seed=3, drop_last=True)
        for _ in er.remaining_epochs_until(3):
            for ids, classes in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(ids), classes).backward()
                optimizer.step()
        return {**parameters(model), **states(optimizer)}

    return train


def states(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Of the optimizer, as dense tensors."""
    found = {}
    for number, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"{number}.{key}"] = value.to_dense() if value.is_sparse else value.clone()
    return found


SCRIPTS = {
    "resize": [Change(2, (1, 2, 3)), Change(5, (2, 3))],
    "kill": [Kill(3, 2, "allreduce"), Change(5, (1, 3))],
    "late": [Kill(4, 1, "optimizer_step", last=True)],
}
CHANGED = [
    Case(tables.OneTable, momentum, True), Case(tables.OneTable, momentum, False), Case(tables.BySome, adagrad, True),
    Case(tables.BySome, adam, True, "dense"), Case(tables.Many, sgd, False),
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("case", CHANGED, ids=lambda case: case.name)
@pytest.mark.matrix(every=9)
def test_a_group_that_changes_gives_the_same_parameters(case: Case, script: str) -> None:
    wanted = run_job(job(Case(case.build, case.optimizer, False, "dense")), first=(1,)).results[1]
    outcome = run_job(job(case), SCRIPTS[script], first=(1, 2))
    assert len(outcome.groups) > 1
    found = list(outcome.results.values())
    for each in found:
        assert each.keys() == found[0].keys() and all(torch.equal(each[name], found[0][name]) for name in each)
    for name, value in wanted.items():
        if name in found[0]:
            torch.testing.assert_close(found[0][name], value, rtol=1e-3, atol=1e-5, msg=name)


# -- how rows travel ---------------------------------------------------------------------------------------------------


class Recorder(operation.RowsOperation):
    """Notes the rounds of each step."""

    rounds: list[list[int]] = []  # noqa: RUF012

    def launch(self, bucket: RowBucket, group: Any) -> Any:
        Recorder.rounds.append([bucket.touched])
        return super().launch(bucket, group)

    def next_round(self, bucket: RowBucket, group: Any, finished: int) -> Any:
        Recorder.rounds[-1].append(finished)
        return super().next_round(bucket, group, finished)


def rounds_of(counts: list[int], table: int) -> list[list[int]]:
    """How many rounds steps take that touch so many rows."""
    from elastic_ray.sync.engine import reduction

    reduction.RowsOperation, Recorder.rounds = Recorder, []  # type: ignore[attr-defined]
    layer = nn.Embedding(table, 2, sparse=True)
    wrapped = er.AdaptiveDataParallel(layer, torch.optim.SGD(layer.parameters(), lr=0.1), strategy="parallax")
    loader = er.AdaptiveDataLoader(torch.arange(2 * len(counts)), batch_size=2)
    for _ in er.remaining_epochs_until(1):
        for count, _x in zip(counts, loader, strict=False):
            layer.zero_grad()
            wrapped(torch.arange(count)).sum().backward()
    reduction.RowsOperation = operation.RowsOperation  # type: ignore[attr-defined]
    return Recorder.rounds


def test_rows_travel_at_once_where_there_is_room(ranks: Ranks) -> None:
    # Two rounds until the number is known, one while it hardly changes, two for more, for a whole table, and after it.
    found = ranks.run(rounds_of, [20, 20, 24, 60, 60, 90, 20, 20, 0, 20], 160, world=2)
    assert found[0] == found[1]
    assert [(touched, len(rounds)) for touched, *rounds in found[0]] == [
        (20, 2), (20, 1), (24, 1), (60, 2), (60, 1), (90, 2), (20, 2), (20, 1), (0, 1), (20, 2)
    ]  # fmt: skip


def rounds_by_rank(each: list[list[int]], table: int) -> list[int]:
    """How many rounds steps take in which rank r touches each[r] rows."""
    return [len(rounds) - 1 for rounds in rounds_of(each[int(os.environ["RANK"])], table)]


def test_all_ranks_take_as_many_rounds_whatever_was_touched(ranks: Ranks) -> None:
    each = [[20, 0, 3, 0, 60, 100, 1, 0, 0, 5], [3, 21, 0, 0, 0, 2, 100, 0, 30, 30]]
    found = ranks.run(rounds_by_rank, each, 160, world=2)
    assert found == [[2, 1, 1, 1, 2, 2, 2, 1, 2, 1]] * 2


def trained_by_sparse_adam(each: list[list[int]], table: int) -> tuple[list[list[int]], list[int]]:
    """Step 1 touches all rows, later ones on rank r those of each[r]: rows of each `.grad`, and rows that stay."""
    torch.manual_seed(0)
    layer = nn.EmbeddingBag(table, 2, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(layer.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(layer, optimizer, strategy="parallax", scaling_rule="none")
    rank, found = int(os.environ.get("RANK", 0)), []
    for _ in er.remaining_epochs_until(1):
        for step, _x in enumerate(er.AdaptiveDataLoader(torch.arange(8), batch_size=2)):
            optimizer.zero_grad()
            wrapped(torch.tensor([each[rank] if step else list(range(table))])).sum().backward()
            assert layer.weight.grad is not None and layer.weight.grad.is_sparse
            found.append(layer.weight.grad._indices()[0].tolist())
            optimizer.step()
            if not step:
                begun = layer.weight.detach().clone()
    return found, (layer.weight == begun).all(1).nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("table", [11, 60], ids=["whole table", "rows"])
def test_a_sparse_gradient_has_the_touched_rows_alone(ranks: Ranks, table: int) -> None:
    each = [list(range(7)), [5, 6, 7, 8]]
    for found, stay in ranks.run(trained_by_sparse_adam, each, table, world=2):
        assert found == [list(range(table)), *[list(range(9))] * 3]
        assert stay == list(range(9, table))
