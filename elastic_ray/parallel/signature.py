"""What decides how long a step of a model takes, as text (torch); see ``elastic_ray.record.fingerprint``."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from elastic_ray.session.link import ModelInfo


def describe_model(module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, amp: bool) -> ModelInfo:
    """A wrapped model."""
    lines = [type(module).__qualname__, type(optimizer).__qualname__, f"amp={amp}"]
    lines += [
        f"{name} {tuple(param.shape)} {param.dtype} {param.requires_grad}" for name, param in module.named_parameters()
    ]
    return ModelInfo(kind=type(module).__name__, details=hashlib.sha256("\n".join(lines).encode()).hexdigest())


def describe_sample(dataset: Any) -> str:
    """A dataset's samples, as far as they can be told without loading one (it may be slow, or draw random numbers)."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    tensors = getattr(dataset, "tensors", ())
    shapes = [f"{tuple(t.shape[1:])} {t.dtype}" for t in tensors if isinstance(t, torch.Tensor)]
    return " ".join([type(dataset).__qualname__, *shapes])
