"""Strategies in units: equal positions synchronise, with the same result as whole workers where none is approximate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.communication.unit_group import UnitGroup
from elastic_ray.sync import DiLoCo, LocalSGD, PowerSGD, StrategyError
from tests.loop.changing import run_job
from tests.loop.unit_threads import Rows, run_units

PARTS = (slice(0, 4), slice(4, 8))
EXACT = ["two_level", "ring", "tree", "star", "ps", "ps_balanced", "partitioned_ar", "random_axis_partition_ar"]
AVERAGING = ["local_sgd", "sma", LocalSGD(period=3), DiLoCo(period=4)]


def train(strategy: Any, part: slice = slice(None), unit: UnitGroup | None = None, **switch: Any) -> Any:
    """All parameters after some steps."""
    model = Rows(part, unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategy, scaling_rule="none")
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    steps = 0
    for _ in er.remaining_epochs_until(2):
        for (x,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(rows), batch_size=5):
            optimizer.zero_grad()
            wrapped(x).square().sum(1).mean().backward()
            optimizer.step()
            steps += 1
            if steps in switch.get("at", {}):
                wrapped.set_strategy(switch["at"][steps])
    return model.weight.detach(), model.scale.detach(), wrapped.strategy.name


def check_as_whole(strategy: Any, folder: Path, units: int = 2, **switch: Any) -> None:
    members = tuple(range(1, units + 1))
    weight, scale, name = run_job(lambda: train(strategy, **switch), first=members).results[1]
    found = run_units(lambda unit: train(strategy, PARTS[unit.place.position], unit, **switch), folder, units=units)
    for row in found:
        torch.testing.assert_close(torch.cat([each[0] for each in row]), weight, rtol=1e-9, atol=1e-12)
        assert all(torch.allclose(each[1], scale, rtol=1e-9) and each[2] == name for each in row)


@pytest.mark.parametrize("strategy", EXACT)
def test_exact_strategies_average_parts(strategy: str, tmp_path: Path) -> None:
    check_as_whole(strategy, tmp_path, units=3)


@pytest.mark.parametrize("strategy", AVERAGING, ids=str)
def test_models_are_averaged_by_parts(strategy: Any, tmp_path: Path) -> None:
    check_as_whole(strategy, tmp_path)


def test_strategies_change_between_steps(tmp_path: Path) -> None:
    check_as_whole("ring", tmp_path, at={3: "local_sgd", 9: "ps", 12: "all_reduce"})


class Matrices(torch.nn.Module):
    """Two layers cut by their inner width, whose last bias both workers hold, or one more matrix."""

    def __init__(self, part: slice, unit: UnitGroup | None, shared: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        up, down = (torch.randn(shape, generator=generator) / 6 for shape in ((32, 16), (16, 32)))
        name = "" if unit is None else str(unit.place.position)
        self.register_parameter(f"up{name}", torch.nn.Parameter(up[part].clone()))
        self.register_parameter(f"down{name}", torch.nn.Parameter(down[:, part].clone()))
        self.bias = torch.nn.Parameter(torch.zeros(16, 16) if shared else torch.zeros(16))
        self.held, self.unit = (getattr(self, f"up{name}"), getattr(self, f"down{name}")), unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.held
        partial = torch.tanh(x @ up.T) @ down.T
        if self.unit is not None:
            partial = partial + (added_in(self.unit, partial.detach()) - partial.detach())
        return partial + (self.bias if self.bias.dim() == 1 else x @ self.bias)


def added_in(unit: UnitGroup, tensor: torch.Tensor) -> torch.Tensor:
    rows = unit.gather(tensor.flatten().tolist())
    return torch.tensor(rows, dtype=torch.float64).sum(0).reshape(tensor.shape).to(tensor.dtype)


def compressed(strategy: Any, unit: UnitGroup | None, *, shared: bool = False) -> tuple[list[torch.Tensor], float]:
    """Parameters after some steps, and the last loss."""
    part = slice(None) if unit is None else (slice(0, 16), slice(16, 32))[unit.place.position]
    model = Matrices(part, unit, shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategy, scaling_rule="none")
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    data = torch.utils.data.TensorDataset(x, torch.roll(x, 1, 1).sin())
    loss = torch.tensor(0.0)
    for _ in er.remaining_epochs_until(12):
        for inputs, targets in er.AdaptiveDataLoader(data, batch_size=16):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(wrapped(inputs), targets)
            loss.backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()], float(loss.detach())


def test_powersgd_keeps_equal_positions_alike(tmp_path: Path) -> None:
    """So do the vectors that several workers of a unit hold; the loss falls as under a plain all-reduce."""
    strategy = PowerSGD(rank=2)
    found = run_units(lambda unit: compressed(strategy, unit), tmp_path)
    plain = run_units(lambda unit: compressed("all_reduce", unit), tmp_path / "plain")
    for position in (0, 1):
        for one, other in zip(found[0][position][0], found[1][position][0], strict=True):
            assert torch.equal(one, other)
    assert torch.equal(found[0][0][0][2], found[0][1][0][2])
    assert found[0][0][1] == pytest.approx(plain[0][0][1], rel=0.2)
    assert not torch.allclose(found[0][0][0][0], plain[0][0][0][0], atol=1e-6)


@pytest.mark.parametrize(("strategy", "shared"), [("int8", False), (PowerSGD(rank=2), True)])
def test_compression_that_parts_equal_parameters_is_refused(strategy: Any, shared: bool, tmp_path: Path) -> None:
    with pytest.raises(
        StrategyError, match=r"is not supported in a job of units.*several workers of the unit hold bias"
    ):
        run_units(lambda unit: compressed(strategy, unit, shared=shared), tmp_path, units=1)


@pytest.mark.parametrize(
    ("strategy", "way_out"),
    [
        ("zero1", "fully_shard"),
        ("zero2", "fully_shard"),
        ("partitioned_ps", "fully_shard"),
        ("auto", "name the fastest"),
        (LocalSGD(give_back=True), "leave give_back=True out"),
        ("pair", "use 'local_sgd' or 'sma'"),
    ],
    ids=str,
)
def test_other_strategies_are_refused_with_a_way_out(strategy: Any, way_out: str, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=rf"is not supported in a job of units.*{way_out}"):
        run_units(lambda unit: train(strategy, PARTS[unit.place.position], unit), tmp_path, units=1)
