"""One worker measures its gradient's noise in layers: what loops see, and what has steps halved instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.monitoring import Monitor
from tests.loop.noisy import GROUPS, changing, job, ratio, rows, trained

torch.set_num_threads(1)


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "adam"}, {"clip": True}, {"weighed": True}, {"amp": True}, {"strategy": "zero2"}],
    ids=str,
)
def test_layers_show_the_noise_of_whole_steps(options: dict[str, Any]) -> None:
    found, fixed = trained(halves=False, **options), trained(adapts=False, halves=False, **options)
    assert set(found.micro_steps) == {1} and fixed.noise[-1] is None
    # Once Adam has moments, the noise is in its units, and what was found in others before is dropped.
    assert found.updates[-1] == len(found.updates) - 5 * (options.get("optimizer") == "adam")
    torch.testing.assert_close(found.parameters, fixed.parameters, rtol=0.0, atol=0.0)
    assert ratio(found.noise[-1]) == pytest.approx(ratio(trained(**options, epochs=8).noise[-1]), rel=1.0)


def test_a_loss_scale_changes_nothing() -> None:
    scaled, plain = trained(halves=False, amp=True), trained(halves=False)
    assert ratio(scaled.noise[-1]) == pytest.approx(ratio(plain.noise[-1]), rel=1e-6)


@pytest.mark.parametrize("amp", [False, True])
def test_a_step_without_numbers_says_nothing(amp: bool) -> None:
    found = trained(halves=False, bad=(2, 6), amp=amp, nonfinite="warn" if amp else "skip")
    ratio(found.noise[-1])
    assert 8 <= found.updates[-1] <= len(found.updates) - 2 and set(found.micro_steps) == {1}


@pytest.mark.parametrize("every", [1, 5])
def test_a_monitor_is_obeyed(every: int) -> None:
    found = trained(adapts=False, halves=False, monitor=Monitor(noise_every=every))
    assert found.updates == [number // every + 1 for number in range(len(found.updates))]


@pytest.mark.parametrize(
    "options",
    [{"norm": True}, {"sharded": True}, {"monitor": Monitor(variance_every=1)}],
    ids=str,
)
def test_other_models_are_halved(options: dict[str, Any]) -> None:
    found = trained(halves=False, **options)
    ratio(found.noise[-1])
    assert found.updates[-1] == found.micro_steps.count(2) > 0


def looped(kind: str) -> tuple[int, int, int]:
    """Halved steps, estimates, and hooks that are left on layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped: Any = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    called = torch.compile(wrapped, backend="eager") if kind == "compiled" else wrapped
    loader = er.AdaptiveDataLoader(rows(), batch_size=12, seed=3)
    if kind != "fixed":
        loader.autoscale_batch_size(96)
    session, halved = current_session(), 0
    for _ in er.remaining_epochs_until(3):
        for x, y in loader:
            step: Any = session.ledger.outermost
            halved += step.halved
            optimizer.zero_grad()
            for _ in range(2 if kind == "two updates" else 1):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(called(x), y)
                loss.backward()
                if kind == "two losses":
                    wrapped(x).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                wrapped(x)
    left = sum(len(module._forward_hooks) for module in model.modules())
    return halved, wrapped._tracker.signal.updates, left


@pytest.mark.parametrize(
    ("kind", "halved", "measured"),
    [
        ("plain", False, True),
        ("fixed", False, False),
        ("two updates", False, True),
        ("two losses", True, True),
        ("compiled", True, True),
    ],
)
def test_loops_that_layers_cannot_show_are_halved(kind: str, halved: bool, measured: bool) -> None:
    steps, updates, hooks = job(lambda: looped(kind))
    assert (steps > 0, updates > 0, hooks) == (halved, measured, 0)


def added_up() -> int:
    """Estimates of a loop that adds gradients up over two steps."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(TensorDataset(torch.randn(90, 3), torch.arange(90) % 2), batch_size=6, seed=3)
    loader.autoscale_batch_size(7)
    for _ in er.remaining_epochs_until(2):
        for x, y in loader:
            nn.functional.cross_entropy(wrapped(x), y).backward()
            if current_session().progress.steps % 2:
                optimizer.step()
                optimizer.zero_grad()
    return wrapped._tracker.signal.updates


def test_gradients_that_are_added_up_are_left_out() -> None:
    assert job(added_up) == 0


@pytest.mark.parametrize("script", list(GROUPS))
def test_layers_go_on_where_ranks_left_off(script: str) -> None:
    first = (1,) if script.startswith("1 ") else (1, 2)
    found = job(lambda: changing(halves=False), GROUPS[script], first)
    assert {micro_steps for _, micro_steps, _, _ in found} == {1}
    updates = [number for *_, number, _ in found]
    assert updates == sorted(updates) and updates[-1] > len(found) / 2
    for (world, _, _, noise), before in zip(found[1:], found, strict=False):
        if world != before[0] and before[3] is not None:
            assert noise is not None and 0.4 < noise.var / before[3].var < 2.5
