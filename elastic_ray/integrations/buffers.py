"""Buffers of a model before an evaluation within a pass."""

from __future__ import annotations

import torch

import elastic_ray as er


def share_buffers(model: torch.nn.Module) -> None:
    """Have every rank evaluate with rank 0's running averages: until a pass ends, each rank has its own."""
    if not any(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in model.modules()):
        return
    buffers = {name: each for name, each in model.named_buffers() if each.numel()}
    told = er.broadcast({name: each.detach() for name, each in buffers.items()})
    with torch.no_grad():
        for name, value in told.items():
            buffers[name].copy_(value)
