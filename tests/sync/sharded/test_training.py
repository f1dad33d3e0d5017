"""Training with tables whose rows live with owners gives what torch gives, in groups that do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.sync import RowSGD
from tests.loop.changing import run_job
from tests.loop.ranks import Ranks
from tests.sync.sharded.tables import Case, assert_same, by_torch, elastic, parameters
from tests.sync.tables import SAMPLES, data

CASES = [
    Case(), Case("adagrad"), Case(copies=1), Case("adagrad", "mean", copies=1), Case(mode="sum", padding=3),
    Case(padding=-87),
]  # fmt: skip


def many(*calls: tuple[Any, ...]) -> list[dict[str, Tensor]]:
    """Several trainings in one group, one after the other."""
    return [elastic(*call) for call in calls]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("world", [None, 2, 3])
def test_unequal_shares_and_accumulation(ranks: Ranks, world: int | None) -> None:
    micro, accumulated = {None: (3, 9), 2: (2, 8), 3: (2, 12)}[world]
    calls = [(case, None, 7) for case in CASES] + [(case, micro, accumulated) for case in CASES[:4]]
    results = ranks.run(many, *calls, world=world)
    for (case, _, batch), found in zip(calls, results[0] if world else results, strict=True):
        assert_same(found, by_torch(case, world or 1, batch))


def scheduled(case: Case) -> dict[str, Tensor]:
    """Rates that change with each step, and one update that is left out; also in torch alone, outside of a job."""
    model = case.sharded()
    optimizer = case.make(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    wrapped = er.AdaptiveDataParallel(model, optimizer, lr_scheduler=scheduler, scaling_rule="none", nonfinite="skip")
    for _ in er.remaining_epochs_until(1):
        for number, (ids, classes) in enumerate(er.AdaptiveDataLoader(data(), batch_size=8, seed=3, drop_last=True)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(ids), classes)
            (loss * torch.inf if number == 1 else loss).backward()
            optimizer.step()
            scheduler.step()
    return parameters(model)


def test_rows_follow_schedule_and_leave_out_what_parameters_do() -> None:
    case = Case("adagrad", rule=RowSGD(lr_factor=2.0))
    found = run_job(lambda: scheduled(case), first=(1, 2)).results[1]
    model = case.plain()
    dense, rows = torch.optim.Adagrad(model.net.parameters(), lr=0.1), torch.optim.SGD(model.table.parameters(), lr=0.2)
    order = torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, 0)[:])
    for number, share in enumerate(order[:24].split(8)):
        ids, classes = data()[share]
        model.zero_grad()
        nn.functional.cross_entropy(model(ids), classes).backward()
        for optimizer, rate in ((dense, 0.1), (rows, 0.2)):
            optimizer.param_groups[0]["lr"] = rate * 0.5**number
            if number != 1:
                optimizer.step()
    assert_same(found, parameters(model))
