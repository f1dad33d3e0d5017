"""Under Rows every model ends as one process with dense gradients does: whatever the layout, the shares, the world."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.loop.ranks import Ranks
from tests.sync import tables
from tests.sync.tables import Case, adagrad, adam, assert_same_update, by_torch, elastic, momentum, sgd

SHAPES = [
    tables.Twice, tables.BySome, tables.Tied, tables.Padded, tables.Mean, tables.Sum, tables.Largest, tables.Double,
    tables.Many,
]  # fmt: skip
CASES = [
    *(Case(tables.OneTable, optimizer, sparse) for optimizer in (sgd, momentum, adagrad) for sparse in (True, False)),
    Case(tables.OneTable, adam, False),
    *(Case(tables.OneTable, adam, sparse, "dense") for sparse in (True, False)),
    *(Case(tables.OneTable, adagrad, sparse, "sparse") for sparse in (True, False)),
    *(Case(shape, sgd, sparse) for shape in SHAPES for sparse in (True, False)),
    Case(tables.BySome, momentum, True),
    Case(tables.BySome, adam, True, "dense"),
    Case(tables.Tied, sgd, False, "sparse"),
]


def exactness(case: Case) -> float:
    """The share of the update within which it must be right."""
    return 1e-3 if case.sparse or case.update == "sparse" else 1e-5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("world", [None, 2, 3])
@pytest.mark.matrix(every=30)
def test_unequal_shares_give_the_whole_batch_s_steps(ranks: Ranks, case: Case, world: Any) -> None:
    wanted = by_torch(case, world=world or 1)
    results = ranks.run(elastic, case, world=world)
    for result in results if world else [results]:
        assert_same_update(case, result, wanted, exactness(case))
    for result in results[1:] if world else []:
        assert all(torch.equal(result[name], results[0][name]) for name in result)
