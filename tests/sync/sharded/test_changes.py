"""Tables whose rows live with owners, while workers come, go and die at bad moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.errors import RowsLostError
from tests.loop.changing import Change, Hold, Kill, Outcome, run_job
from tests.sync.sharded.tables import Case, Model, assert_same
from tests.sync.tables import ROWS, SAMPLES, data

EPOCHS = 3


class _Run:
    """One worker's: its losses by step, and the table as it ended."""

    def __init__(self, case: Case) -> None:
        self.losses: dict[int, float] = {}
        self.held: list[int] = []
        model: Model = case.sharded()
        optimizer = case.make(model)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        loader = er.AdaptiveDataLoader(data(), batch_size=8, seed=3, drop_last=True)
        for _ in er.remaining_epochs_until(EPOCHS):
            for ids, classes in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(wrapped(ids), classes)
                loss.backward()
                optimizer.step()
                store = model.table._table._shard.store
                self.held.append(len(store.tiles) if store is not None else 0)
        table = model.table.row_state_dict()
        dense = {name: p.detach().clone() for name, p in model.net.named_parameters()}
        self.state = {f"table.{name}": tensor for name, tensor in table.items()} | {
            f"net.{name}": tensor for name, tensor in dense.items()
        }
        store = model.table._table._shard.store
        self.rows = {tile: {name: store.tile(name, tile).clone() for name in store.tensors} for tile in store.tiles}


def job(case: Case) -> Any:
    """A train function for scripted changes."""
    return lambda: _Run(case)


def check(case: Case, script: Sequence[Any], first: tuple[int, ...]) -> Outcome:
    """The job's table is that of torch alone, and owners of the same rows hold the same bits."""
    outcome = run_job(job(case), script, first=first)
    model = case.plain()
    optimizer = case.make(model)
    for epoch in range(EPOCHS):
        order = IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]
        for start in range(0, SAMPLES - 7, 8):
            ids, classes = data()[torch.from_numpy(order[start : start + 8])]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids), classes).backward()
            optimizer.step()
    wanted = {name: tensor.detach() for name, tensor in model.named_parameters()}
    last = outcome.groups[-1]
    for worker, run in outcome.results.items():
        state = {name: tensor for name, tensor in run.state.items() if name in wanted}
        if worker == last[0]:
            assert_same(state, wanted)
        for other in outcome.results.values():
            for tile in run.rows.keys() & other.rows.keys():
                for name, tensor in run.rows[tile].items():
                    assert torch.equal(tensor, other.rows[tile][name]), (worker, tile, name)
    tiles = {tile for run in outcome.results.values() for tile in run.rows}
    assert len(tiles) == ROWS
    return outcome


@pytest.mark.parametrize("case", [Case("adagrad"), Case(copies=1)], ids=["two owners", "one owner"])
def test_two_to_four_to_three(case: Case) -> None:
    outcome = check(case, [Change(2, (1, 2, 3, 4)), Change(5, (2, 3, 4))], (1, 2))
    share = min(case.copies, 3) * ROWS / 3
    assert all(abs(len(run.rows) - share) <= 1 for run in outcome.results.values())
    # A joiner has never held more than its share.
    assert max(outcome.results[3].held) <= share + 1


@pytest.mark.parametrize("case", [Case("adagrad"), Case(copies=1)], ids=["two owners", "one owner"])
def test_down_to_one_and_up_again(case: Case) -> None:
    check(case, [Change(2, (3,)), Change(5, (3, 4))], (1, 2, 3))


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("moment", ["forward", "backward", "allreduce", "vote", "optimizer_step", "after_step", "edge"])
def test_a_worker_dies_at_any_moment(moment: str) -> None:
    check(Case("adagrad"), [Kill(3, 2, moment)], (1, 2, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["optimizer_step", "after_step", "edge"])
def test_the_last_to_come_there_dies(moment: str) -> None:
    check(Case("adagrad"), [Kill(4, 3, moment, last=True)], (1, 2, 3, 4))


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("held", [(2, 3), (1, 3), (1,), (3,)])
def test_workers_that_have_voted_make_a_survivors_update(held: tuple[int, ...]) -> None:
    """Of the four, one applies the step and dies; those that are held do not know that it was decided."""
    script = [Kill(3, 4, "after_step"), *(Hold(3, worker, "vote") for worker in held)]
    check(Case("adagrad"), script, (1, 2, 3, 4))


def test_step_that_no_survivor_has_made_is_drawn_again() -> None:
    check(Case("adagrad"), [Kill(3, 4, "after_step"), *(Hold(3, worker, "vote") for worker in (1, 2, 3))], (1, 2, 3, 4))


@pytest.mark.parametrize("worker", [2, 3], ids=["member", "joiner"])
def test_a_worker_dies_while_rows_are_about_to_move(worker: int) -> None:
    check(Case("adagrad"), [Change(2, (1, 2, 3, 4)), Kill(3, worker, "receiving")], (1, 2))


def test_two_workers_die_one_after_the_other() -> None:
    check(Case("adagrad"), [Kill(3, 2, "allreduce"), Kill(5, 1, "after_step"), Change(7, (3, 4, 5))], (1, 2, 3, 4))


def test_with_one_owner_loss_is_told_on_every_worker() -> None:
    with pytest.raises(RowsLostError, match=r"% of the rows of ShardedEmbedding 'table' were lost .*copies=1"):
        run_job(job(Case(copies=1)), [Kill(3, 2, "forward")], first=(1, 2, 3))
