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


def test_scaled_options_are_those_of_the_step() -> None:
    """Others have made the update with scaled options, which the optimizer has no more when this rank makes it."""
    scaled = {"lr": 0.2, "betas": (0.9, 0.8145), "eps": 0.5, "weight_decay": 0.3}

    def made(*, late: bool) -> torch.Tensor:
        model = nn.Linear(3, 2, bias=False)
        nn.init.constant_(model.weight, 0.5)
        optimizer: Any = torch.optim.AdamW(model.parameters(), 0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0.1)
        model(torch.ones(4, 3)).square().mean().backward()
        group = optimizer.param_groups[0]
        params = dict(model.named_parameters())
        held = HeldTiles(Tiling(((Span("weight", 0, 6, False),),)), params)
        held.take(0, [{}])
        pending = PendingUpdate(optimizer, held, params, 1, 1) if late else None
        usual = {name: group[name] for name in scaled}
        group.update(scaled)
        rates = rates_of(optimizer)
        if pending is None:
            optimizer.step()
            return model.weight.detach()
        group.update(usual)
        pending.make(optimizer.step, rates)
        assert {name: group[name] for name in scaled} == usual
        return model.weight.detach()

    assert torch.equal(made(late=True), made(late=False))
