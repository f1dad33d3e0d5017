"""What decides how long a step of a model takes, as text (torch); see ``elastic_ray.record.fingerprint``."""

from __future__ import annotations

import hashlib

import torch

from elastic_ray.batch.reports import ModelInfo


def describe_model(module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, amp: bool) -> ModelInfo:
    """A wrapped model."""
    lines = [type(module).__qualname__, type(optimizer).__qualname__, f"amp={amp}"]
    lines += [
        f"{name} {tuple(param.shape)} {param.dtype} {param.requires_grad}" for name, param in module.named_parameters()
    ]
    return ModelInfo(kind=type(module).__name__, details=hashlib.sha256("\n".join(lines).encode()).hexdigest())
