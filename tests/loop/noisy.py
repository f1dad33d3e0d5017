"""Loops of one worker and of several whose noise is measured, for tests of how it is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.monitoring import Monitor
from placement.goodput.model import NoiseScale
from tests.loop.changing import Change, Kill, run_job


def job(train: Callable[[], Any], script: Any = (), first: tuple[int, ...] = (1,)) -> Any:
    """What the first worker that is left has found."""
    results = run_job(train, script, first=first).results
    return results[min(results)]


def rows(count: int = 96, width: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def net(*, norm: bool = False, frozen: bool = False) -> nn.Module:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(8))
    model = nn.Sequential(*layers).double()
    if frozen:
        layers[0].requires_grad_(False)
    return model


@dataclasses.dataclass(frozen=True)
class Case:
    """How it is trained."""

    optimizer: str = "sgd"
    adapts: bool = True
    monitor: Monitor | None = None
    strategy: str | None = None
    norm: bool = False
    frozen: bool = False
    amp: bool = False
    weighed: bool = False
    sums: bool = False
    sharded: bool = False
    clip: bool = False
    bad: tuple[int, ...] = ()  # steps with a NaN in the loss
    quiet: tuple[int, int] = (0, 0)  # steps whose gradient is zero
    batch: int = 12
    epochs: int = 2
    nonfinite: str = "warn"
    halves: bool = True  # rather than layers


@dataclasses.dataclass
class Found:
    """Noise after each step, updates that it holds, parameters at the end, and micro-steps of each step."""

    noise: list[NoiseScale | None]
    updates: list[int]
    parameters: torch.Tensor
    micro_steps: list[int]
    measures: Any


def train(case: Case) -> Found:
    model: Any = net(norm=case.norm, frozen=case.frozen)
    if case.sharded:
        model = er.fully_shard(model)
    rate = 1e-3 if case.optimizer == "adam" else 0.05
    kind = torch.optim.Adam if case.optimizer == "adam" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=rate)
    options: dict[str, Any] = {} if case.strategy is None else {"strategy": case.strategy}
    if case.monitor is not None:
        options["monitor"] = case.monitor
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if case.amp else None
    wrapped = er.AdaptiveDataParallel(
        model, optimizer, scaling_rule="none", grad_scaler=scaler, nonfinite=case.nonfinite, **options
    )
    loader = er.AdaptiveDataLoader(rows(), batch_size=case.batch, seed=3)
    if case.adapts:
        loader.autoscale_batch_size(96)
    session = current_session()
    if case.halves:
        session.registry.need_halves()
    found = Found([], [], torch.zeros(0), [], None)
    for _ in er.remaining_epochs_until(case.epochs):
        for x, y in loader:
            step, number = session.ledger.outermost, session.progress.steps
            assert step is not None
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(x), y, reduction="sum" if case.sums else "mean")
            if case.weighed:  # as if some were padding
                counts = (y > 0).double()
                loader.weigh(float(counts.sum()))
                loss = (nn.functional.cross_entropy(wrapped(x), y, reduction="none") * counts).sum() / counts.sum()
            if case.quiet[0] <= number < case.quiet[1]:
                loss = loss * 0.0
            if number in case.bad and step.micro == 0:
                loss = loss * float("nan")
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                if case.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            if step.is_last_micro:
                found.noise.append(wrapped.noise_scale)
                found.updates.append(wrapped._tracker.signal.updates)
                found.micro_steps.append(step.micro_steps)
    found.measures = wrapped.measures
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found.parameters = torch.cat([p.detach().reshape(-1).double() for p in whole])
    return found


def trained(**options: Any) -> Found:
    case = Case(**options)
    found = job(lambda: train(case))
    assert isinstance(found, Found)
    return found


def ratio(noise: NoiseScale | None) -> float:
    assert noise is not None
    assert math.isfinite(noise.var) and math.isfinite(noise.sqr) and noise.var > 0 and noise.sqr > 0
    return noise.var / noise.sqr


GROUPS: dict[str, list[Any]] = {
    "1 -> 2 -> 1": [Change(6, (1, 2)), Change(12, (1,))],
    "1 -> another one": [Change(7, (1, 2)), Change(9, (2,))],
    "2 -> 1 -> 2": [Change(5, (1,)), Change(11, (1, 3))],
    "one dies": [Kill(7, 2, "allreduce")],
}


def changing(*, halves: bool = True) -> list[tuple[int, int, int, NoiseScale | None]]:
    """World, micro-steps, estimates and noise after each step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(rows(), batch_size=8, seed=3)
    loader.autoscale_batch_size(96)
    session, found = current_session(), []
    if halves:
        session.registry.need_halves()
    for _ in er.remaining_epochs_until(2):
        for x, y in loader:
            step = session.ledger.outermost
            assert step is not None
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if step.is_last_micro:
                found.append((len(step.sizes), step.micro_steps, wrapped._tracker.signal.updates, wrapped.noise_scale))
    return found
