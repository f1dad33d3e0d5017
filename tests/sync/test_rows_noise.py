"""The gradient noise scale under Rows is that of dense gradients."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.monitoring import Monitor
from tests.loop.ranks import Ranks
from tests.sync import tables
from tests.sync.tables import Case, adagrad, adam, sgd

CASES = [
    Case(tables.OneTable, sgd, True), Case(tables.OneTable, sgd, False), Case(tables.Twice, adagrad, True),
    Case(tables.BySome, adagrad, False), Case(tables.OneTable, adam, False), Case(tables.Many, sgd, True),
]  # fmt: skip


def noise(case: Case, strategy: Any, micro: int | None = None) -> tuple[float, float]:
    """What is measured in four epochs."""
    model = case.model(sparse=case.sparse)
    optimizer = case.optimizer(model)
    asked = Monitor(noise_every=1)  # one worker takes steps in halves where somebody wants its noise
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy, monitor=asked)
    loader = er.AdaptiveDataLoader(tables.data(), batch_size=8, seed=3, drop_last=True)
    if micro is not None:
        loader.autoscale_batch_size(tables.SAMPLES, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    current_session().registry.need_halves()  # of whole tables, layers show it
    for _ in er.remaining_epochs_until(4):
        for ids, classes in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(ids), classes).backward()
            optimizer.step()
    found = wrapped.noise_scale
    assert found is not None
    return found.sqr, found.var


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("world", "micro"), [(None, None), (2, None), (None, 4), (2, 2)])
@pytest.mark.matrix(every=16)
def test_it_is_the_exact_one(ranks: Ranks, case: Case, world: Any, micro: int | None) -> None:
    wanted = ranks.run(noise, Case(case.build, case.optimizer, False), "all_reduce", micro, world=world)
    found = ranks.run(noise, case, case.strategy, micro, world=world)
    for mine, exact in zip(found, wanted, strict=True) if world else [(found, wanted)]:
        # Of whole tables, preconditioners are kept in bfloat16, which rounds by up to 0.4 %; sqr is the difference of
        # two numbers of the size of var.
        assert mine == pytest.approx(exact, rel=1e-2, abs=1e-4 * exact[1])
