"""Variance and norms that ranks measure in their steps are those that gradients by hand give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.batch.halving import UNHALVED_STEPS
from elastic_ray.data.order import IndexOrder
from elastic_ray.data.sharding import step_size
from elastic_ray.loop.api import current_session
from elastic_ray.monitoring import Monitor, StepMeasures
from tests.loop.ranks import Ranks
from tests.loop.trainee import each

SAMPLES, EVERY_STEP = 50, Monitor(noise_every=1, variance_every=1, norms_every=1)
MAKERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
}


def rows() -> torch.utils.data.TensorDataset:
    """Noisy rows."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, torch.randint(3, (SAMPLES,), generator=generator))


def net() -> nn.Module:
    """The same small model each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases, at rates of their own."""
    return [{"params": [p for p in model.parameters() if p.dim() == kind], "lr": 0.02 * kind} for kind in (2, 1)]


Seen = tuple[int, Sequence[Sequence[int]], StepMeasures]


def measured(maker: str, batch: int, micro: int | None, monitor: Monitor, backwards: int = 1) -> list[Seen]:
    """Of each step its number and sizes, and what is known after its update."""
    model = net()
    optimizer = MAKERS[maker](two_groups(model))
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", monitor=monitor)
    loader = er.AdaptiveDataLoader(rows(), batch_size=batch, seed=3)
    if micro is not None:
        loader.autoscale_batch_size(SAMPLES, local_bsz_bounds=(1, micro), gradient_accumulation=True)
    session, seen = current_session(), []
    for _ in er.remaining_epochs_until(2):
        for x, y in loader:
            optimizer.zero_grad()
            for _ in range(backwards):
                (nn.functional.cross_entropy(wrapped(x), y) / backwards).backward()
            optimizer.step()
            step = session.ledger.outermost
            if step.is_last_micro:
                seen.append((session.progress.steps, step.sizes, wrapped.measures))
    return seen


class ByHand:
    """The same training in plain torch, with every sample's gradient at hand."""

    def __init__(self, maker: str) -> None:
        self.model = net()
        self.optimizer = MAKERS[maker](two_groups(self.model))
        self.kinds = (2, 1)

    def gradients(self, indices: Tensor) -> list[Tensor]:
        """Mean gradient of these samples, one vector for each parameter group."""
        x, y = rows()[indices]
        loss = nn.functional.cross_entropy(self.model(x), y)
        grads = torch.autograd.grad(loss, list(self.model.parameters()))
        return [torch.cat([g.reshape(-1) for g in grads if g.dim() == kind]) for kind in self.kinds]

    def step(self, indices: Tensor, sizes: Sequence[Sequence[int]]) -> tuple[list[float], list[float], list[float]]:
        """Sample variance, gradient norms and update norms by group; ``sizes`` cut the samples as ranks do."""
        pieces = torch.split(indices, [size for row in sizes for size in row])
        found = [self.gradients(piece) for piece in pieces]
        mean = self.gradients(indices)
        variance = [
            sum(len(piece) * float((of[g] - mean[g]).square().sum()) for piece, of in zip(pieces, found, strict=True))
            / max(1, len(pieces) - 1)
            for g in range(2)
        ]
        before = self.flat()
        self.optimizer.zero_grad()
        x, y = rows()[indices]
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        moved = [float((after - old).norm()) for after, old in zip(self.flat(), before, strict=True)]
        return variance, [float(each.norm()) for each in mean], moved

    def flat(self) -> list[Tensor]:
        params = list(self.model.parameters())
        return [torch.cat([p.detach().reshape(-1) for p in params if p.dim() == kind]) for kind in self.kinds]


def batches(batch: int, world: int) -> list[Tensor]:
    """Indices of each step of two epochs."""
    found = []
    for epoch in range(2):
        order, position = torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]), 0
        while count := step_size(position=position, total=SAMPLES, batch_size=batch, world_size=world):
            found.append(order[position : position + count])
            position += count
    return found


SHARES = [(2, 8, None), (3, 9, None), (3, 7, None), (2, 8, 2), (3, 12, 2), (None, 8, 2), (None, 9, 4)]
"""World, global batch, most samples at once: equal shares, unequal ones, with and without accumulation."""


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("maker", ["sgd", "adam"])
@pytest.mark.parametrize(("world", "batch", "micro"), SHARES)
def test_variance_and_norms_are_those_that_all_gradients_give(
    ranks: Ranks, world: int | None, batch: int, micro: int | None, maker: str
) -> None:
    results = each(ranks, world, measured, maker, batch, micro, EVERY_STEP)
    hand = ByHand(maker)
    wanted = [
        hand.step(indices, sizes) for indices, (_, sizes, _) in zip(batches(batch, world or 1), results[0], strict=True)
    ]
    several = world is not None
    for result in results:
        assert [one for _, _, one in result] == [one for _, _, one in results[0]], "ranks know the same"
        for number, (_, _, measures) in enumerate(result):
            source = number - several  # what one step has shown is known with the next one
            if source < 0:
                assert measures.variance is None and measures.norms is None
                continue
            variance, gradients, updates = wanted[source]
            assert measures.variance is not None and measures.norms is not None
            assert (measures.variance.step, measures.norms.step) == (source, source)
            assert measures.variance.batch_size == len(batches(batch, world or 1)[source])
            assert measures.variance.groups == pytest.approx(variance, rel=1e-5)
            assert measures.norms.gradients == pytest.approx(gradients, rel=1e-5)
            assert measures.norms.updates == pytest.approx(updates, rel=1e-5)


@pytest.mark.parametrize("maker", ["momentum", "nesterov"])
def test_update_norms_are_how_far_parameters_have_moved(ranks: Ranks, maker: str) -> None:
    [result] = each(ranks, None, measured, maker, 10, None, Monitor(norms_every=1))
    hand = ByHand(maker)
    for indices, (_, sizes, measures) in zip(batches(10, 1), result, strict=True):
        assert measures.norms is not None and measures.variance is None
        _, gradients, updates = hand.step(indices, sizes)
        assert measures.norms.gradients == pytest.approx(gradients, rel=1e-9)
        assert measures.norms.updates == pytest.approx(updates, rel=1e-9)
        assert measures.norms.update == pytest.approx(math.hypot(*updates))


@pytest.mark.parametrize("every", [1, 3])
def test_two_halves_stand_for_two_samples_with_one_gradient(ranks: Ranks, every: int) -> None:
    [result] = each(ranks, None, measured, "sgd", 9, None, Monitor(variance_every=every))
    hand, known = ByHand("sgd"), None
    for number, (indices, (_, sizes, measures)) in enumerate(zip(batches(9, 1), result, strict=True)):
        variance, _, _ = hand.step(indices, sizes)
        if (
            number >= UNHALVED_STEPS and number % every == 0 and len(indices) >= 4
        ):  # 9 samples are 5 and 4, the last 5 of an epoch 3 and 2
            assert len(sizes[0]) == 2 and abs(sizes[0][0] - sizes[0][1]) <= 1
            known = number, len(indices), variance
        else:
            assert len(sizes[0]) == 1
        if known is None:
            assert measures.variance is None
            continue
        assert measures.variance is not None
        assert (measures.variance.step, measures.variance.batch_size) == known[:2]
        assert measures.variance.groups == pytest.approx(known[2], rel=1e-5)


def test_what_is_asked_for_occasionally_is_measured_occasionally(ranks: Ranks) -> None:
    results = each(ranks, 2, measured, "sgd", 8, None, Monitor(variance_every=4, norms_every=3))
    for number, (_, _, measures) in enumerate(results[1]):
        variance, norms = measures.variance, measures.norms
        assert (variance.step if variance else None) == ((number - 1) // 4 * 4 if number else None)
        assert (norms.step if norms else None) == ((number - 1) // 3 * 3 if number else None)


@pytest.mark.parametrize("world", [None, 2])
def test_nothing_is_measured_unasked(ranks: Ranks, world: int | None) -> None:
    for result in each(ranks, world, measured, "sgd", 8, None, Monitor()):
        last = result[-1][2]
        assert last.variance is None and last.norms is None and last.workers == ()
        assert last.initial_batch_size == 8
        if world is None:  # a step in halves takes longer
            assert last.noise is None and all(len(sizes[0]) == 1 for _, sizes, _ in result)
        else:
            assert last.noise is not None and last.noise_batch is not None


def test_sum_of_two_losses_has_the_norm_of_both(ranks: Ranks) -> None:
    """Two equal halves of one loss: their noises count as independent, so half the variance is found."""
    once = each(ranks, 2, measured, "sgd", 8, None, EVERY_STEP)
    twice = each(ranks, 2, measured, "sgd", 8, None, EVERY_STEP, 2)
    for (_, _, one), (_, _, two) in zip(once[0][1:], twice[0][1:], strict=True):
        assert two.norms.gradients == pytest.approx(one.norms.gradients, rel=1e-6)
        assert two.variance.groups == pytest.approx([value / 2 for value in one.variance.groups], rel=1e-4)
