"""Users' loops around an optimizer whose state is in tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.monitoring import Monitor
from tests.loop.changing import Change, Kill
from tests.sync.tiles.trained import OPTIMIZERS, Net, data

FOUR = (1, 2, 3, 4)


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(50, 8), nn.Linear(8, 3)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(self.table(ids).sum(1))


@dataclasses.dataclass(frozen=True)
class Loop:
    """Trains in another way than `Run`."""

    strategy: Any
    model: Callable[[], nn.Module] = Net
    optimizer: str = "adamw"
    micro: int | None = None
    scaler: bool = False
    unfreeze: bool = False
    monitor: Monitor | None = None
    rule: str | None = "none"
    spoiled: int = -1

    def __call__(self) -> Any:
        model = self.model()
        if self.unfreeze:
            model.first.requires_grad_(False)
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5) if self.scaler else None
        options: dict[str, Any] = {"monitor": self.monitor} if self.monitor is not None else {}
        wrapped = er.AdaptiveDataParallel(
            model, optimizer, None, scaler, self.rule, "skip" if self.spoiled >= 0 else "warn", self.strategy, **options
        )
        tabled = isinstance(model, Tabled)
        ids = torch.randint(50, (96, 4), generator=torch.Generator().manual_seed(3))
        samples = torch.utils.data.TensorDataset(ids, ids.sum(1) % 3) if tabled else data()
        loader = er.AdaptiveDataLoader(samples, batch_size=12, seed=3, drop_last=True)
        if self.micro is not None:
            loader.autoscale_batch_size(48, local_bsz_bounds=(1, self.micro), gradient_accumulation=True)
        for epoch in er.remaining_epochs_until(4):
            if epoch == 1 and self.unfreeze:
                model.first.requires_grad_(True)
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(wrapped(x), y)
                if er.get_context().get_global_step() == self.spoiled and er.get_context().get_world_rank() == 1:
                    loss = loss * float("nan")
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                    continue
                scaler.scale(loss).backward()
                if er.get_context().get_global_step() in (3, 12):
                    model.last.bias.grad.fill_(float("inf"))
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
        return [p.detach().clone() for p in model.parameters()], wrapped.noise_scale, wrapped.measures


SCRIPT = [Change(6, (1, 2, 3, 4, 5)), Kill(10, 2, "after_step", last=True), Change(20, (3, 4))]
