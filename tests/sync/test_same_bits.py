"""What each rank computes for itself of what all hold comes out alike, whatever the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.sync import Strategy
from elastic_ray.sync.operations.low_rank import orthonormal, product_of
from elastic_ray.sync.spec import Reduce, Wire
from tests.loop.ranks import Ranks

SHAPES = [(20000, 16, 4), (4096, 33, 2), (1000, 37, 3), (33, 65, 5), (1, 9, 1)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_neither_depends_on_the_number_of_threads(rows: int, columns: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(3)
    matrix, factor = torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)
    bases, products = [], []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        bases.append(orthonormal(matrix))
        products.append(torch.cat([piece.clone() for _, piece in product_of(bases[-1].float(), factor)]))
    assert all(torch.equal(each, bases[0]) for each in bases)
    assert all(torch.equal(each, products[0]) for each in products)
    torch.testing.assert_close(products[0], bases[0].float() @ factor)


def test_columns_are_orthonormal_and_span_the_same() -> None:
    matrix = torch.randn(500, 4, generator=torch.Generator().manual_seed(3)) * torch.tensor([1e6, 1.0, 1e-3, 1e-10])
    basis = orthonormal(matrix)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-12)
    wide = matrix.double()
    torch.testing.assert_close(basis @ (basis.t() @ wide), wide, rtol=1e-9, atol=1e-12)


def test_dependent_columns_are_left_out_infinities_are_not() -> None:
    one = torch.randn(50, 1, generator=torch.Generator().manual_seed(3))
    basis = orthonormal(torch.cat([one, 2 * one, torch.zeros(50, 1)], 1))
    assert basis[:, 0].norm() > 0.99 and not bool(basis[:, 1:].any())
    assert not bool(orthonormal(torch.zeros(50, 2)).any())
    for value in (float("nan"), float("inf")):
        spoilt = one.clone()
        spoilt[7] = value
        assert not bool(orthonormal(spoilt).isfinite().all())


def _with_threads_of_its_own() -> torch.Tensor:
    """Rank r computes with 2 r + 1 threads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 9000), nn.Linear(9000, 37, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    strategy = Strategy(default=Reduce(wire=Wire(rank=3)))
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategy, scaling_rule="none")
    torch.set_num_threads(2 * er.get_context().get_world_rank() + 1)
    data = torch.utils.data.TensorDataset(torch.randn(48, 40, generator=torch.Generator().manual_seed(1)))
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(data, batch_size=8, seed=3):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_low_rank_replicas_stay_one_with_other_thread_numbers(ranks: Ranks) -> None:
    first, second = ranks.run(_with_threads_of_its_own, world=2)
    assert torch.equal(first, second)
