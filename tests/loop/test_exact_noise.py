"""Estimates of the gradient noise are right on average: against per-sample gradients, at rest and in fast training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.monitoring import Monitor
from tests.loop.changing import Change, run_job
from tests.loop.ranks import Ranks

SAMPLES, FEATURES, CLASSES = 20_000, 12, 4  # few enough steps for one or two epochs: what was trained on fits better
LARGEST_RATE = 6.0  # at twice this the loss rises from the first epoch on


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which a part of the labels is noise, so that both signal and noise stay."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    logits = x @ torch.randn(FEATURES, CLASSES, generator=generator, dtype=torch.float64)
    noise = 2.0 * torch.randn(SAMPLES, CLASSES, generator=generator, dtype=torch.float64)
    return x, (logits + noise).argmax(1)


def exact(model: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Squared norm of the gradient of all rows, and the trace of the samples' covariance."""
    with torch.no_grad():
        error = model(x).softmax(1)
        error[torch.arange(len(y)), y] -= 1.0
        whole = error.T @ x / len(y)
        bias = error.mean(0)
        squared = (error.square().sum(1) * (x.square().sum(1) + 1.0)).mean()
        sqr = whole.square().sum() + bias.square().sum()
        return float(sqr), float((squared - sqr) * len(y) / (len(y) - 1))


Sums = tuple[float, float, int]
"""Sums of the raw estimates over those of the exact values, signal and noise; how many estimates there were."""


def compared(batch: int, most: int | None, rate: float, steps: int, halves: bool) -> Sums:
    """What the first so many estimates of a group make."""
    [sums] = followed(batch, most, rate, steps=steps, halves=halves).values()
    return sums


def followed(
    batch: int,
    most: int | None,
    rate: float,
    *,
    steps: int | None = None,
    last: int | None = None,
    halves: bool = False,
) -> dict[int, Sums]:
    """The same for each number of ranks that there was, until so many estimates or that committed step."""
    x, y = rows()
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", monitor=Monitor(noise_every=1))
    loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(x, y), batch_size=batch, seed=1)
    if most is not None:
        loader.autoscale_batch_size(batch, local_bsz_bounds=(1, most), gradient_accumulation=True)
    session: Any = current_session()
    if halves:
        session.registry.need_halves()
    found_by = dict[int, list[float]]()
    for _ in er.remaining_epochs_until(1000):
        for xs, ys in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(xs), ys).backward()
            pending: Any = wrapped._tracker._pending
            sums = found_by.setdefault(session.world_size, [0.0] * 5)
            if session.ledger.outermost.is_last_micro and pending is not None:
                [group] = pending.estimates
                found = group.sqr, group.var * batch, *exact(model, x, y), 1.0
                sums[:] = [a + b for a, b in zip(sums, found, strict=True)]
            optimizer.step()
            if sums[4] == steps or session.progress.steps == last:
                return {n: (s[0] / s[2], s[1] / s[3], int(s[4])) for n, s in found_by.items() if s[4]}
    raise AssertionError("there were too few estimates")


FAST: list[tuple[int | str | None, int, int | None, int]] = [
    ("halves", 17, None, 700),
    (None, 17, None, 700),
    (None, 64, 16, 400),
    (2, 64, 16, 400),
]
SLOW: list[tuple[int | str | None, int, int | None, int]] = [
    ("halves", 512, None, 60),
    (None, 512, None, 60),
    (None, 16, None, 1200),
    (None, 64, None, 400),
    (None, 48, 24, 400),
    (2, 16, None, 1200),
    (2, 256, 32, 80),
    (3, 50, None, 400),
    (4, 64, 8, 300),
]
"""World, or "halves" of one rank; global batch, most samples at once, estimates; halves of 17 are unequal."""


@pytest.mark.thorough
@pytest.mark.parametrize(("rate", "allowed"), [(0.0, 0.05), (LARGEST_RATE, 0.15)])
@pytest.mark.parametrize(
    ("world", "batch", "most", "steps"), [*FAST, *(pytest.param(*cut, marks=pytest.mark.slow) for cut in SLOW)]
)
def test_estimates_are_right_on_average(
    ranks: Ranks, world: Any, batch: int, most: int | None, steps: int, rate: float, allowed: float
) -> None:
    halves, world = world == "halves", None if world == "halves" else world
    found = ranks.run(compared, batch, most, rate, steps, halves, world=world)
    signal, noise, count = found if world is None else found[0]
    assert count >= steps
    assert signal == pytest.approx(1.0, abs=allowed)
    assert noise == pytest.approx(1.0, abs=allowed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("batch", "rate", "allowed"),
    [
        (64, LARGEST_RATE, 0.15),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(64, 0.0, 0.05), (16, 0.0, 0.05), (16, LARGEST_RATE, 0.15)]
        ),
    ],
)
def test_so_they_are_in_groups_that_shrink_and_grow(batch: int, rate: float, allowed: float) -> None:
    script = [Change(150, (1,)), Change(1000, (1, 3))]  # one worker halves few of its steps
    found = run_job(lambda: followed(batch, None, rate, last=1200), script, first=(1, 2)).results[1]
    assert set(found) == {1, 2}
    for signal, noise, count in found.values():
        assert count > 100
        assert signal == pytest.approx(1.0, abs=allowed)
        assert noise == pytest.approx(1.0, abs=allowed)
