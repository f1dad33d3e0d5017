"""Workers of a unit whose parts of the model differ, and with them the number of their collectives."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.communication.unit_group import UnitGroup
from tests.loop.unit_threads import run_units


class Stage(nn.Module):
    """Stage of a pipeline; the second has a layer of its own that only one unit's samples use."""

    def __init__(self, *, branch: bool, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.branch = nn.Linear(6, 6) if branch else None
        self.norm = nn.BatchNorm1d(6) if norm else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x if self.norm is None else self.norm(x))
        return x if self.branch is None or er.get_context().get_world_rank() == 0 else self.branch(x)


def trained(unit: UnitGroup, strategy: Any, *, norm: bool) -> list[torch.Tensor]:
    """State of this worker's part after two passes."""
    torch.manual_seed(0)
    second = unit.place.position == 1
    model = Stage(branch=second and not norm, norm=second and norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategy, scaling_rule="none")
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    for _ in er.remaining_epochs_until(2):
        for (x,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(rows), batch_size=10):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers(), *moments)]


@pytest.mark.parametrize("norm", [False, True], ids=["branch", "norm"])
@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd", "diloco"])
def test_units_agree_on_unlike_collectives(strategy: str, norm: bool, tmp_path: Path) -> None:
    found = run_units(lambda unit: trained(unit, strategy, norm=norm), tmp_path)
    for one, other in zip(found[0], found[1], strict=True):
        assert len(one) == len(other) > 0
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def counted(unit: UnitGroup) -> dict[str, float]:
    """Sums that only a unit's last worker adds to, as the last stage of a pipeline does."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    sums = er.Accumulator()
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(40, 6)), batch_size=10):
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
            for name in range(40 * unit.place.position):  # more than a vote has room for
                sums[f"class {name}"] += len(x)
    return dict(sums)


def test_a_last_stage_adds_to_many_names(tmp_path: Path) -> None:
    for first, last in run_units(counted, tmp_path):
        assert first == {} and last == {f"class {name}": 40.0 for name in range(40)}


def summed(unit: UnitGroup) -> list[list[float]]:
    """Sum over the units, of nothing on their first workers."""
    model = nn.Linear(6, 1)
    er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.01), scaling_rule="none")
    for _ in er.remaining_epochs_until(1):
        return [er.all_reduce(torch.ones(unit.place.position), op="sum").tolist() for _ in range(2)]
    return []


def test_workers_of_a_unit_may_add_up_nothing(tmp_path: Path) -> None:
    assert run_units(summed, tmp_path) == [[[[], []], [[2.0], [2.0]]]] * 2


class Roomless(nn.Module):
    """Has no room for a batch that it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 1), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += not self.training
        if not self.training and len(x) > 5:
            raise torch.OutOfMemoryError("as if")
        return self.linear(x)


def evaluated(unit: UnitGroup) -> int:
    """Number of calls of this worker's part for one batch, which has collectives with the others' parts."""
    model = Roomless()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(40, 6)), batch_size=20):
            optimizer.zero_grad()
            wrapped(x).mean().backward()
            optimizer.step()
        wrapped.eval()
        with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
            wrapped(torch.ones(10, 6))
    return model.calls


def test_no_part_evaluates_in_parts_by_itself(tmp_path: Path) -> None:
    assert run_units(evaluated, tmp_path) == [[1, 1], [1, 1]]
