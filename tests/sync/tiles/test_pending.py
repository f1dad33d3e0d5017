"""Updates of tiles that a rank makes later than the others, when it hears that they were decided."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic_ray.sync.optimizer_tiles.pending import PendingUpdate, rates_of
from elastic_ray.sync.optimizer_tiles.states import HeldTiles
from elastic_ray.sync.optimizer_tiles.tiling import Span, Tiling


def trained(*, late: bool) -> torch.Tensor:
    """The weight after an update in the step, or one that is made once the step is lost."""
    torch.manual_seed(1)
    model = nn.Linear(3, 2, bias=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.randn(4, 3)).square().mean()).backward()
    if not late:
        scaler.step(optimizer)
        return model.weight.detach()
    params = dict(model.named_parameters())
    held = HeldTiles(Tiling(((Span("weight", 0, 6, False),),)), params)
    held.take(0, [{}])
    pending: list[PendingUpdate] = []
    step, optimizer.step = optimizer.step, lambda: pending.append(PendingUpdate(optimizer, held, params, 1, 1))
    scaler.step(optimizer)
    pending[0].make(step, rates_of(optimizer))
    assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
    return model.weight.detach()


def test_fused_optimizers_has_the_loss_scale_of_its_step() -> None:
    assert torch.equal(trained(late=True), trained(late=False))
