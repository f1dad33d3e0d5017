"""A job whose models are averaged, and the same in one process, with plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.sync.spec import Average

SAMPLES, BATCH, EPOCHS = 60, 12, 2
STEPS = SAMPLES // BATCH * EPOCHS


def net() -> nn.Module:
    """The same small model each time; torch's own generator belongs to all threads."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.5, 0.6, p.numel(), dtype=torch.float64).reshape(p.shape) + 0.03 * number)
    return model


def rows() -> torch.utils.data.TensorDataset:
    """Fixed rows, with their numbers."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, torch.arange(SAMPLES))


def weights(model: nn.Module) -> Tensor:
    """All parameters, flat."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


Make = Callable[[nn.Module], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What a rank has seen of a step: its samples, and its model before and after its update."""

    step: int
    world: int
    samples: list[int]
    before: Tensor
    after: Tensor

    @property
    def applied(self) -> bool:
        """Whether the optimizer has stepped."""
        return not torch.equal(self.before, self.after)


class Loop:
    """A train loop; returns the parameters, and what each of its steps has seen.

    Args:
        strategy: of the wrapper.
        make: the optimizer.
        inside: called in each step, after its update.
        batch: global batch.
        micro: most samples that a rank takes at once.
        every: steps whose gradients are added up by hand.
    """

    def __init__(
        self,
        strategy: Any,
        make: Make = sgd,
        inside: Callable[[int, nn.Module], None] = lambda step, model: None,
        batch: int = BATCH,
        micro: int | None = None,
        every: int = 1,
    ) -> None:
        self._strategy, self._make, self._inside, self._batch = strategy, make, inside, batch
        self._micro, self._every = micro, every

    def __call__(self) -> tuple[Tensor, list[Seen]]:
        model = net()
        optimizer = self._make(model)
        wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=self._strategy)
        loader = er.AdaptiveDataLoader(rows(), batch_size=self._batch, seed=3)
        if self._micro is not None:
            loader.autoscale_batch_size(self._batch, local_bsz_bounds=(1, self._micro), gradient_accumulation=True)
        context = er.get_context()
        seen: list[Seen] = []
        for _ in er.remaining_epochs_until(EPOCHS):
            for x, numbers in loader:
                step, world, before = context.get_global_step(), context.get_world_size(), weights(model)
                if step % self._every == 0:
                    optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                if (step + 1) % self._every == 0:
                    optimizer.step()
                seen.append(Seen(step, world, numbers.tolist(), before, weights(model)))
                self._inside(step, model)
        return weights(model), seen


def reference(average: Average, world: int, make: Make = sgd, batch: int = BATCH) -> tuple[Tensor, list[Tensor]]:
    """All replicas in one process: the model that all end with, and the mean of the replicas after each step."""
    replicas = [net() for _ in range(world)]
    optimizers = [make(model) for model in replicas]
    anchor = weights(replicas[0])
    momentum = torch.zeros_like(anchor)
    (samples, _), means, steps = rows().tensors, [], 0
    for epoch in range(EPOCHS):
        order = torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:])
        for taken in order.split(batch):
            for model, optimizer, share in zip(replicas, optimizers, taken.chunk(world), strict=True):
                optimizer.zero_grad()
                model(samples[share]).square().mean().backward()
                optimizer.step()
                if isinstance(optimizer, torch.optim.AdamW):
                    _of_batch(optimizer, world, steps + 1)
            steps += 1
            flat = torch.stack([weights(model) for model in replicas])
            means.append(flat.mean(0))
            if steps % average.period == 0:
                flat, anchor, momentum = _averaged(average, flat, steps, anchor, momentum)
            _put(replicas, flat)
        _put(replicas, flat.mean(0).expand_as(flat))
        _mean_states(optimizers)
    return weights(replicas[0]), means


def _averaged(
    average: Average, flat: Tensor, steps: int, anchor: Tensor, momentum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One average, by the formulas."""
    mean = flat.mean(0)
    if average.algorithm == "local_sgd":
        return mean.expand_as(flat), anchor, momentum
    if average.algorithm == "sma":
        return (1 - average.alpha) * flat + average.alpha * mean, anchor, momentum
    outer = torch.optim.SGD(
        [nn.Parameter(anchor.clone())],
        lr=average.outer_lr,
        momentum=average.outer_momentum,
        nesterov=average.outer_momentum > 0,
    )
    (param,) = outer.param_groups[0]["params"]
    param.grad = anchor - mean
    outer.state[param] = {"momentum_buffer": momentum.clone()}
    outer.step()
    anchor = param.detach().clone()
    return anchor.expand_as(flat), anchor, outer.state[param].get("momentum_buffer", momentum)


def _of_batch(optimizer: torch.optim.Optimizer, world: int, step: int) -> None:
    """Moments of the whole batch, by the formula, of AdamW's usual coefficients."""
    a = 0.1 / 1.9 * (1 + 0.9**step) / (1 - 0.9**step)
    weight = 63 / 64 if step == 1 else min(63 / 64, (1 - 1 / world) / (1 - a))
    for p, state in optimizer.state.items():
        state["exp_avg_sq"] += 0.001 * weight * ((state["exp_avg"] / (1 - 0.9**step)) ** 2 - p.grad**2)


def _put(replicas: Sequence[nn.Module], flat: Tensor) -> None:
    with torch.no_grad():
        for model, values in zip(replicas, flat, strict=True):
            torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())


def _mean_states(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """The consensus of what optimizers keep."""
    for params in zip(*(each.param_groups[0]["params"] for each in optimizers), strict=True):
        states = [each.state[p] for each, p in zip(optimizers, params, strict=True)]
        for name in states[0]:
            mean = torch.stack([state[name] for state in states]).mean(0)
            for state in states:
                state[name] = mean.clone()
