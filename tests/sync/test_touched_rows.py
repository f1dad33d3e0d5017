"""Arithmetic on touched rows is that on the whole table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_ray.sync.preconditioners import preconditioner, squared_norm
from elastic_ray.sync.tables.rows_operation import pays
from elastic_ray.sync.tables.touched_rows import (
    TouchedRows,
    added_up,
    no_rows,
    row_preconditioner,
    rows_of_dense,
    rows_of_sparse,
)

TABLE, WIDTH = 12, 3


def some(seed: int, count: int = 4) -> TouchedRows:
    """Rows at random."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(TABLE, generator=generator)[:count].sort().values
    return TouchedRows(table=TABLE, ids=ids, values=torch.randn(count, WIDTH, generator=generator))


def every(seed: int) -> TouchedRows:
    """A whole table."""
    values = torch.randn(TABLE, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TouchedRows(table=TABLE, ids=None, values=values)


@pytest.mark.parametrize("parts", [[some(0), some(1), some(2)], [some(0), every(1), some(2), every(3)], [some(0, 0)]])
def test_sums(parts: list[TouchedRows]) -> None:
    found = added_up(parts)
    torch.testing.assert_close(found.to_dense(), torch.stack([part.to_dense() for part in parts]).sum(0))
    assert found.ids is None or torch.equal(found.ids, found.ids.unique())


def test_sums_leave_the_parts_alone() -> None:
    parts = [every(1), some(0)]
    before = [part.values.clone() for part in parts]
    added_up(parts)
    assert all(torch.equal(part.values, each) for part, each in zip(parts, before, strict=True))


class Weights:
    """Of a whole table."""

    def __init__(self) -> None:
        self.whole = torch.rand(TABLE, WIDTH)

    def of(self, ids: Tensor | None) -> Tensor:
        return self.whole if ids is None else self.whole[ids]


@pytest.mark.parametrize("rows", [some(0), some(1, 0), every(2)])
@pytest.mark.parametrize("weights", [None, Weights()])
def test_norms(rows: TouchedRows, weights: Weights | None) -> None:
    flat = None if weights is None else weights.whole.reshape(-1)
    torch.testing.assert_close(rows.squared_norm(weights), squared_norm(rows.to_dense().reshape(-1), flat))


def elements(optimizer: torch.optim.Optimizer, table: torch.nn.Parameter) -> torch.Tensor:
    """What the elements of the table's gradient are multiplied with."""
    found = preconditioner(optimizer, [table])
    assert found is not None
    return torch.stack([found.squared_norm(each) for each in torch.eye(TABLE * WIDTH)]).sqrt().view(TABLE, WIDTH)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("rows", [some(0), every(2)])
def test_preconditioners(rows: TouchedRows, optimizer: Any) -> None:
    table = torch.nn.Parameter(torch.zeros(TABLE, WIDTH))
    made = optimizer([table])
    assert row_preconditioner(made, table, None) is None
    for step in range(6):
        table.grad = some(step).to_dense()
        made.step()
    found = row_preconditioner(made, table, None)
    whole = elements(made, table)
    assert found is not None
    made.step()  # what was computed stays
    torch.testing.assert_close(found.of(rows.ids), whole[rows.at()])
    again = row_preconditioner(made, table, found)
    assert again is not None
    torch.testing.assert_close(again.of(None), elements(made, table))


def test_rows_of_a_sparse_gradient_come_once() -> None:
    grad = torch.sparse_coo_tensor([[7, 2, 7]], torch.ones(3, WIDTH), (TABLE, WIDTH))
    found = rows_of_sparse(grad)
    assert found.at().tolist() == [2, 7] and found.values[:, 0].tolist() == [1.0, 2.0]
    torch.testing.assert_close(found.to_sparse().to_dense(), grad.to_dense())


@pytest.mark.parametrize("value", [1e-30, -1.0, math.nan, math.inf])
def test_rows_of_a_dense_gradient_are_the_nonzero_ones(value: float) -> None:
    grad = torch.zeros(TABLE, WIDTH)
    grad[4, 1], grad[5] = value, Tensor([1.0, -1.0, 0.0])
    assert rows_of_dense(grad).at().tolist() == [4, 5]
    assert rows_of_dense(grad + 1).count == TABLE


def test_no_rows() -> None:
    none = no_rows(torch.zeros(TABLE, WIDTH))
    assert none.count == 0 and float(none.squared_norm(None)) == 0 and not none.to_dense().any()


@pytest.mark.parametrize(("most", "world", "wanted"), [(50, 2, True), (51, 2, False), (25, 4, True), (26, 4, False)])
def test_rows_pay_while_no_more_than_the_tables(most: int, world: int, wanted: bool) -> None:
    assert pays(most, 100, world) is wanted
