"""The gradient noise scale of a model that units hold in parts is that of the same model on whole workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.unit_group import UnitGroup
from elastic_ray.loop.api import current_session
from elastic_ray.sync.checks import StrategyError
from elastic_ray.unit import Unit
from placement.goodput.model import NoiseScale
from tests.loop.changing import run_job
from tests.loop.unit_threads import FEATURES, Rows, run_units

SAMPLES, EPOCHS = 24, 24


def noise(
    optimizer: str, part: slice = slice(None), unit: UnitGroup | None = None, *, twice: bool = False
) -> NoiseScale | None:
    """The noise scale when all steps are the same one, which is measured in all of them or in some.

    Args:
        twice: the optimizer steps before the backward pass as well as after it.
    """
    model = Rows(part, unit)
    stepped = getattr(torch.optim, optimizer)(
        [{"params": [model.scale, model.late]}, {"params": [model.weight], "weight_decay": 0.0}], lr=0.0
    )
    wrapped = er.AdaptiveDataParallel(model, stepped, scaling_rule="adascale")
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(torch.cat([rows, rows]))
    loader = er.AdaptiveDataLoader(data, batch_size=SAMPLES, shuffle=False)
    loader.autoscale_batch_size(2 * SAMPLES, local_bsz_bounds=(2, 2 * SAMPLES))
    for _ in er.remaining_epochs_until(EPOCHS):
        for (x,) in loader:
            if twice:
                stepped.step()
            stepped.zero_grad()
            wrapped(x).square().sum(1).mean().backward()
            stepped.step()
    return wrapped.noise_scale


def in_units(optimizer: str, folder: Path, parts: tuple[slice, slice], units: int = 2, **options: bool) -> NoiseScale:
    """The noise scale on all workers of two units."""

    def train(unit: UnitGroup) -> Any:
        return noise(optimizer, parts[unit.place.position], unit, **options)

    found = [each for row in run_units(train, folder, units=units) for each in row]
    assert all(each == found[0] for each in found) and found[0] is not None
    return found[0]


@pytest.mark.parametrize(("optimizer", "twice"), [("SGD", False), ("SGD", True), ("Adam", False)])
def test_noise_of_parts_is_that_of_the_whole(optimizer: str, twice: bool, tmp_path: Path) -> None:
    """Rows are on one worker of the unit each, the scale counts once; parts may differ in size."""
    wanted = run_job(lambda: noise(optimizer, twice=twice), first=(1, 2)).results[1]
    assert wanted is not None and wanted.sqr > 0 and wanted.var > 0
    found = in_units(optimizer, tmp_path, (slice(0, 3), slice(3, 8)), twice=twice)
    assert (found.sqr, found.var) == pytest.approx((wanted.sqr, wanted.var), rel=1e-5)


def test_parameter_without_gradients_at_first_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of a unit learn that together, and drop the estimate in which it counted twice."""
    monkeypatch.setattr(Rows, "begins", 5)
    wanted = run_job(lambda: noise("SGD"), first=(1, 2)).results[1]
    assert wanted is not None
    found = in_units("SGD", tmp_path, (slice(0, 4), slice(4, 8)))
    assert (found.sqr, found.var) == pytest.approx((wanted.sqr, wanted.var), rel=0.05)


def test_unit_alone_measures_in_halves(tmp_path: Path) -> None:
    wanted = run_job(lambda: noise("SGD")).results[1]
    assert wanted is not None
    found = in_units("SGD", tmp_path, (slice(0, 4), slice(4, 8)), units=1)
    assert (found.sqr, found.var) == pytest.approx((wanted.sqr, wanted.var), rel=1e-5)


def test_adaptive_batch_is_cut_into_equal_shards(tmp_path: Path) -> None:
    """A batch that the job chooses, of 5 samples here, is one that the shards can share out."""

    def train(unit: UnitGroup) -> list[int]:
        model = nn.Linear(FEATURES, 1)
        wrapped = er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.0))
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(36, FEATURES)), batch_size=4)
        loader.autoscale_batch_size(36, local_bsz_bounds=(1, 18))
        sizes = []
        for _ in er.remaining_epochs_until(2):
            for (x,) in loader:
                sizes.append(len(x))
                wrapped(x).sum().backward()
                if len(sizes) == 3:
                    current_session().membership.wanted_batch = BatchChoice(atomic_bsz=5)
        return [*sizes, loader.current_batch_size]

    (first, second), *_ = run_units(train, tmp_path, units=1, unit=Unit(shard=2))
    assert first == second and first[-1] == 4 and sum(first[:-1]) == 36


@pytest.mark.parametrize("unit", [Unit(shard=2), Unit(tp=2)], ids=["shard", "tp"])
def test_sums_count_each_sample_of_a_unit_once(unit: Unit, tmp_path: Path) -> None:
    def train(_: UnitGroup) -> list[dict[str, float]]:
        model = nn.Linear(FEATURES, 1)
        wrapped = er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.0), scaling_rule="none")
        rows = torch.arange(12.0).repeat_interleave(FEATURES).reshape(12, FEATURES)
        sums = []
        for _ in er.remaining_epochs_until(1):
            total = er.Accumulator()
            for (x,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(rows), batch_size=4):
                wrapped(x).sum().backward()
                total["samples"] += len(x)
                total["numbers"] += x[:, 0].sum().item()
            sums.append(dict(total))
        return sums

    for row in run_units(train, tmp_path, unit=unit):
        for found in row:
            assert found == [{"samples": 12.0, "numbers": 66.0}]


def scaled(strategy: str, part: slice = slice(None)) -> tuple[list[list[float]], float]:
    """Rows after some steps of which one overflows, in the last row alone, and the loss scale."""
    model = Rows(part, None)
    model.scale.requires_grad_(False)
    model.late.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    wrapped = er.AdaptiveDataParallel(model, optimizer, grad_scaler=scaler, scaling_rule="none", strategy=strategy)
    x = torch.linspace(-1, 1, SAMPLES * FEATURES, dtype=torch.float64).reshape(SAMPLES, FEATURES)
    steps = 0
    for _ in er.remaining_epochs_until(2):
        for (rows,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(x), batch_size=8, shuffle=False):
            optimizer.zero_grad()
            weights = torch.ones(8, dtype=torch.float64)
            weights[-1] = float("inf") if steps == 3 else 1.0
            scaler.scale((wrapped(rows).square() * weights[part]).sum(1).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            steps += 1
    return model.weight.tolist(), scaler.get_scale()


@pytest.mark.parametrize("strategy", ["all_reduce", "bf16", "fp16"])
def test_overflow_on_one_worker_leaves_update_out_everywhere(strategy: str, tmp_path: Path) -> None:
    rows, scale = run_job(lambda: scaled(strategy), first=(1, 2)).results[1]
    parts = (slice(0, 3), slice(3, 8))
    for first, second in run_units(lambda unit: scaled(strategy, parts[unit.place.position]), tmp_path):
        assert first[1] == second[1] == scale == 4.0
        torch.testing.assert_close(torch.tensor([*first[0], *second[0]]), torch.tensor(rows))


def test_strategies_that_mix_elements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"'int8' is not supported in a job of units.*'bf16' or 'fp16'"):
        run_units(lambda unit: scaled("int8"), tmp_path, units=1)
