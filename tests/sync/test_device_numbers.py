"""Numbers on devices. Those of GPUs are fakes of torch's own, which says where tensors of two devices meet."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from elastic_ray.sync.device_numbers import Number, added, read, read_with, with_steps_read
from elastic_ray.sync.preconditioners import preconditioner
from tests.batch.waits import Waits


def test_all_are_read_in_their_order_by_one_look() -> None:
    with Waits() as waits:
        found = read([1.0, torch.tensor(2.0), torch.tensor(3), 4.0, torch.tensor(5.0, dtype=torch.float64)])
    assert found == [1.0, 2.0, 3.0, 4.0, 5.0] and waits.count == 0
    assert read([]) == [] and read([torch.tensor(2.5)]) == [2.5]


@pytest.mark.parametrize(("one", "other", "there"), [(0, 1, 0), (1, 0, 1), (None, 1, 1), (1, None, 1), (0, 0, 0)])
def test_sums_stay_on_a_gpu(one: int | None, other: int | None, there: int) -> None:
    with FakeTensorMode():
        first, second = (torch.empty((), device="cpu" if gpu is None else f"cuda:{gpu}") for gpu in (one, other))
        found = added([0.0, first, second])
    assert isinstance(found, torch.Tensor) and found.device == torch.device("cuda", there)


def test_fused_preconditioners_do_not_wait_for_each_step_count() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(6):
        model(torch.randn(3, 2)).square().mean().backward()
        optimizer.step()
    with Waits() as waits:
        found = preconditioner(optimizer, list(model.parameters()))
        assert found is not None
        found.squared_norm(torch.ones(sum(p.numel() for p in model.parameters())))
    assert waits.count == 0


def test_states_without_a_count_are_as_they_are() -> None:
    states = [{"step": torch.tensor(3.0), "other": 1}, {}, {"step": 2}]
    assert with_steps_read(states) == [{"step": 3.0, "other": 1}, {}, {"step": 2}]


def test_a_vector_and_numbers_are_read_in_their_order() -> None:
    numbers: list[Number] = [3.0, torch.tensor(4.0), 5.0, torch.tensor(6.5, dtype=torch.float64)]
    assert read_with(torch.tensor([1.0, 2.0]), numbers) == ([1.0, 2.0], [3.0, 4.0, 5.0, 6.5])
    assert read_with(torch.tensor([1.0, 2.0]), [3.0]) == ([1.0, 2.0], [3.0])
    assert read_with(torch.tensor([1.0]), []) == ([1.0], [])


def test_what_is_not_finite_stays_so_beside_a_vector() -> None:
    vector, numbers = read_with(torch.tensor([1.0]), [torch.tensor(math.inf), torch.tensor(math.nan)])
    assert vector == [1.0] and numbers[0] == math.inf and math.isnan(numbers[1])
