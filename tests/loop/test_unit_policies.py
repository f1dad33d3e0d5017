"""Policies and monitors in units: one worker of each decides for all of it, and measures are of whole models."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.adaptation import Policy, PolicyError, PolicyView, ScaleRate, SetBatch, SetStrategy, Stop
from elastic_ray.communication.unit_group import UnitGroup
from elastic_ray.loop.api import current_session
from elastic_ray.monitoring import Monitor, StepMeasures
from elastic_ray.unit import Unit
from tests.loop.changing import run_job
from tests.loop.unit_threads import Rows, run_units

PARTS = (slice(0, 3), slice(3, 8))


class Scripted(Policy):
    """Asks for changes at fixed steps, and keeps what it has seen."""

    def __init__(self) -> None:
        self.seen = 0

    def before_step(self, view: PolicyView) -> Any:
        return ScaleRate(0.5) if view.step == 2 else None

    def after_step(self, view: PolicyView) -> Any:
        self.seen += 1
        return {1: SetBatch(8), 5: SetBatch(None), 10: Stop("enough")}.get(view.step)


def train(policy: Policy | list[Policy], part: slice = slice(None), unit: UnitGroup | None = None) -> Any:
    model = Rows(part, unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = er.AdaptiveDataParallel(model, optimizer, policy=policy, scaling_rule="linear")
    rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
    loader.autoscale_batch_size(16)
    sizes = []
    for _ in er.remaining_epochs_until(5):
        for (x,) in loader:
            sizes.append(loader.current_batch_size)
            optimizer.zero_grad()
            wrapped(x).square().sum(1).mean().backward()
            optimizer.step()
    return model.weight.detach(), sizes, current_session().adaptation.runner.values


def test_requests_are_applied_on_all_workers(tmp_path: Path) -> None:
    """As on whole workers: the batch and the rates change in the same steps, and the training ends in the same."""
    weight, sizes, _ = run_job(lambda: train(Scripted()), first=(1, 2)).results[1]
    found = run_units(lambda unit: train(Scripted(), PARTS[unit.place.position], unit), tmp_path)
    assert len(set(sizes)) == 2 and len(sizes) < 30
    for first, second in found:
        assert first[1] == second[1] == sizes
        torch.testing.assert_close(torch.cat([first[0], second[0]]), weight)
        assert first[2].rate_factor == second[2].rate_factor == 0.5


class ByChance(Policy):
    """Asks for something else on each worker that calls it."""

    asked: int = 0
    lock = threading.Lock()

    def after_step(self, view: PolicyView) -> Any:
        with ByChance.lock:
            ByChance.asked += 1
            return ScaleRate(1.0 + ByChance.asked / 8) if view.step == 1 else None


def test_chance_on_one_worker_is_its_units(tmp_path: Path) -> None:
    """All workers of a unit do what one of them was told; units that differ refuse it together."""

    def of(unit: UnitGroup) -> Any:
        return train(ByChance(), PARTS[unit.place.position], unit)[2]

    ((first, second),) = run_units(of, tmp_path / "one", units=1)
    assert first.rate_factor == second.rate_factor > 1.0 and not first.off
    for row in run_units(of, tmp_path / "two"):
        assert [(each.rate_factor, list(each.off)) for each in row] == [(1.0, [0])] * 2


class Late(Policy):
    """Takes too long, on the worker that decides."""

    deadline_s = 0.05

    def after_step(self, view: PolicyView) -> Any:
        threading.Event().wait(0.5)


class Wrong(Policy):
    """Raises an error."""

    strict = True

    def after_step(self, view: PolicyView) -> Any:
        raise KeyError("it")


def test_failing_policies_fail_on_all_workers(tmp_path: Path) -> None:
    for row in run_units(lambda unit: train(Late(), PARTS[unit.place.position], unit)[2], tmp_path / "late"):
        assert [list(each.off) for each in row] == [[0], [0]]

    def of(unit: UnitGroup) -> str:
        with pytest.raises(PolicyError, match=r"Wrong failed in after_step: KeyError"):
            train(Wrong(), PARTS[unit.place.position], unit)
        return "raised"

    assert run_units(of, tmp_path / "wrong") == [["raised", "raised"]] * 2


def test_workers_of_a_unit_must_ask_alike(tmp_path: Path) -> None:
    def of(unit: UnitGroup) -> Any:
        policy: list[Policy] = [Scripted()] if unit.leads else []
        return train(policy, PARTS[unit.place.position], unit)

    with pytest.raises(ValueError, match=r"all workers of a unit must give the same policy=.*has the policies"):
        run_units(of, tmp_path, units=1)


class Strategies(Policy):
    """Asks for a strategy that units do not support."""

    def after_step(self, view: PolicyView) -> Any:
        return SetStrategy("zero1") if view.step == 1 else None


def test_strategies_that_units_refuse_stay_requests(tmp_path: Path) -> None:
    for row in run_units(lambda unit: train(Strategies(), PARTS[unit.place.position], unit), tmp_path):
        assert [each[1] == [4] * 30 for each in row] == [True, True]


def measures(optimizer: str, part: slice = slice(None), unit: UnitGroup | None = None) -> list[StepMeasures]:
    """Measures after each step."""
    model = Rows(part, unit)
    groups = [{"params": [model.scale, model.late]}, {"params": [model.weight]}]
    stepped = getattr(torch.optim, optimizer)(groups, lr=0.01)
    monitor = Monitor(noise_every=4, variance_every=4, norms_every=4, workers=True)
    wrapped = er.AdaptiveDataParallel(model, stepped, monitor=monitor)
    rows = torch.randn(48, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = []
    for _ in er.remaining_epochs_until(2):
        for (x,) in er.AdaptiveDataLoader(torch.utils.data.TensorDataset(rows), batch_size=4):
            stepped.zero_grad()
            wrapped(x).square().sum(1).mean().backward()
            stepped.step()
            found.append(wrapped.measures)
    return found


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("workers", [2, 1])
def test_measures_are_of_the_whole_model(optimizer: str, workers: int, tmp_path: Path) -> None:
    """Variance and norms add up over the unit, and what two workers hold counts once, from the first look on."""
    wanted = run_job(lambda: measures(optimizer), first=tuple(range(1, workers + 1))).results[1]
    found = run_units(lambda unit: measures(optimizer, PARTS[unit.place.position], unit), tmp_path, units=workers)
    for row in found:
        for step, (first, second, whole) in enumerate(zip(*row, wanted, strict=True)):
            assert first.variance == second.variance and first.norms == second.norms
            assert first.workers == second.workers and len(first.workers) in (0, workers)
            if step >= 6:
                assert first.norms is not None and whole.norms is not None
                assert first.norms.step == whole.norms.step
                assert first.norms.gradients == pytest.approx(whole.norms.gradients, rel=1e-5)
                assert first.norms.updates == pytest.approx(whole.norms.updates, rel=1e-5)
            if step >= 6 and workers > 1:
                assert first.variance is not None and whole.variance is not None
                assert first.variance.groups == pytest.approx(whole.variance.groups, rel=1e-4)
    assert wanted[-1].norms is not None and (wanted[-1].variance is not None) == (workers > 1)


def test_first_measurement_is_made_again_if_it_counted_twice(tmp_path: Path) -> None:
    """Not a hundred steps later, when the next one is due."""

    def of(unit: UnitGroup) -> Any:
        model = Rows(PARTS[unit.place.position], unit)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped = er.AdaptiveDataParallel(model, optimizer, monitor=Monitor(norms_every=100))
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(40, 6).double()), batch_size=8)
        for _ in er.remaining_epochs_until(1):
            for (x,) in loader:
                optimizer.zero_grad()
                wrapped(x).square().sum(1).mean().backward()
                optimizer.step()
        return wrapped.measures.norms

    for row in run_units(of, tmp_path):
        assert all(each is not None and each.step == 1 for each in row)


def test_unlike_parameter_groups_are_refused_with_a_monitor(tmp_path: Path) -> None:
    def of(unit: UnitGroup) -> None:
        model = nn.Linear(6, 1)
        groups = [{"params": [p]} for p in model.parameters()] if unit.leads else model.parameters()
        optimizer = torch.optim.SGD(groups, lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, monitor=Monitor(norms_every=1), scaling_rule="none")
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(8, 6)), batch_size=4)
        for _ in er.remaining_epochs_until(1):
            for (x,) in loader:
                wrapped(x).sum().backward()
                optimizer.step()

    with pytest.raises(er.sync.StrategyError, match=r"monitor=. needs gradient statistics.*\[2, 1\]"):
        run_units(of, tmp_path, units=1, unit=Unit(pp=2))
