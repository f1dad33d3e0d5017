"""A loop whose exact gradients are known, and what its workers owe of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.loop.api import current_session
from elastic_ray.sync import Strategy
from elastic_ray.sync.spec import Reduce, Wire

SAMPLES, BATCH, EPOCHS = 50, 7, 2
WAYS: list[Any] = ["int8", Strategy(default=Reduce(wire=Wire(rank=1), bucket_bytes=1024))]
NAMES = ["int8", "low-rank"]
ways = pytest.mark.parametrize("way", WAYS, ids=NAMES)


def net() -> nn.Module:
    """The same small model each time; torch's own generator belongs to all threads."""
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.5, 0.6, p.numel()).sin().reshape(p.shape) + 0.03 * number)
    return model


def rows() -> torch.utils.data.TensorDataset:
    """Fixed rows."""
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(torch.randn(SAMPLES, 12, generator=generator))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Of some size."""
    return model(x).square().sum(1).mean()


def batches(batch_size: int = BATCH) -> list[Tensor]:
    """What each step trains on."""
    (samples,) = rows().tensors
    orders = [torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]) for epoch in range(EPOCHS)]
    whole = SAMPLES // batch_size * batch_size
    return [samples[batch] for order in orders for batch in order[:whole].split(batch_size)]


def exact(batch_size: int = BATCH, make: Callable[[], nn.Module] = net) -> Tensor:
    """The mean gradients of all steps, [steps, elements]."""
    model, found = make(), []
    for batch in batches(batch_size):
        model.zero_grad()
        loss_of(model, batch).backward()
        found.append(gradients(model))
    return torch.stack(found)


def gradients(model: nn.Module) -> Tensor:
    """All of them, flat."""
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).double()


def owed_by(wrapped: Any) -> Tensor:
    """What this rank owes, in the order of the model's parameters."""
    debtors = wrapped._sync._owed._debtors
    by_name = {name: piece for each in debtors for name, piece in each.by_name(each.owed()).items()}
    pieces = [by_name.get(name, torch.zeros_like(p)) for name, p in wrapped.module.named_parameters()]
    return torch.cat([piece.detach().reshape(-1) for piece in pieces]).double()


class Loop:
    """Trains; returns what this worker owes at the end.

    Kept of each worker and step are the gradients that it applied, what it owed before the step, and after it.

    Args:
        way: the strategy.
        micro: most samples that a rank takes at once.
        every: steps whose gradients are added up by hand.
        synced: of these, how many are synchronised together.
        scaler: makes AMP's.
        inside: called at the beginning of each step.
        make: the model.
        batch_size: of all ranks.
        behind: called after each step's update.
        votes: whether ranks agree at each step's edge, by adding to an accumulator.
    """

    def __init__(
        self,
        way: Any,
        micro: int | None = None,
        every: int = 1,
        synced: int = 1,
        scaler: Callable[[], Any] = lambda: None,
        inside: Callable[[int, Any], None] = lambda step, wrapped: None,
        batch_size: int = BATCH,
        votes: bool = False,
        behind: Callable[[int, Any], None] = lambda step, wrapped: None,
        make: Callable[[], nn.Module] = net,
    ) -> None:
        self.applied: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self.before: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self.after: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self._batch_size, self._votes = batch_size, votes
        self._way, self._micro, self._every, self._synced = way, micro, every, synced
        self._scaler, self._inside, self._behind, self._make = scaler, inside, behind, make

    def __call__(self) -> Tensor:
        model = self._make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = self._scaler()
        wrapped = er.AdaptiveDataParallel(
            model, optimizer, scaling_rule="none", strategy=self._way, grad_scaler=scaler, nonfinite="ignore"
        )
        loader = er.AdaptiveDataLoader(rows(), batch_size=self._batch_size, seed=3, drop_last=True)
        if self._micro is not None:
            loader.autoscale_batch_size(self._batch_size, local_bsz_bounds=(1, self._micro), gradient_accumulation=True)
        context, worker = er.get_context(), int(current_session().worker.removeprefix("w") or 0)
        sums = er.Accumulator() if self._votes else None
        for _ in er.remaining_epochs_until(EPOCHS):
            for (x,) in loader:
                step = context.get_global_step()
                self._inside(step, wrapped)
                self.before[worker][step] = owed_by(wrapped)
                loss = loss_of(wrapped, x)
                with nullcontext() if (step + 1) % self._synced == 0 else wrapped.no_sync():
                    (loss if scaler is None else scaler.scale(loss)).backward()
                if (step + 1) % self._every:
                    continue
                if scaler is not None:
                    scaler.unscale_(optimizer)
                self.applied[worker][step] = gradients(model)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
                if sums is not None:
                    sums["samples"] += len(x)
                self._behind(step, wrapped)
                self.after[worker][step] = owed_by(wrapped)
        wrapped._sync.remember()  # the last step counts
        return owed_by(wrapped)


def total(loop: Loop, left_out: Sequence[int] = ()) -> Tensor:
    """The sum of what was applied in all steps."""
    applied: dict[int, Tensor] = {}
    for by_step in loop.applied.values():
        for step, each in by_step.items():
            if step not in left_out:
                assert torch.equal(applied.setdefault(step, each), each), "the mean is the same on all ranks"
    return torch.stack(list(applied.values())).sum(0)
