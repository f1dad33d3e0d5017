"""What decides how long a step of a model takes, as text (torch); see ``elastic_ray.record.fingerprint``."""

from __future__ import annotations

import dataclasses
import hashlib

import torch

from elastic_ray.batch.reports import ModelInfo
from elastic_ray.sync.builders import AllReduce


def describe_model(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, amp: bool, strategy: object = None
) -> ModelInfo:
    """A wrapped model.

    Args:
        module: the model.
        optimizer: steps it.
        amp: its loss is scaled.
        strategy: builder of its synchronisation's strategy; None is plain all-reduce.
    """
    lines = [type(module).__qualname__, type(optimizer).__qualname__, f"amp={amp}"]
    lines += [
        f"{name} {tuple(param.shape)} {param.dtype} {param.requires_grad}" for name, param in module.named_parameters()
    ]
    if strategy is not None and strategy != AllReduce():
        lines.append(repr(strategy) if dataclasses.is_dataclass(strategy) else type(strategy).__qualname__)
    return ModelInfo(kind=type(module).__name__, details=hashlib.sha256("\n".join(lines).encode()).hexdigest())
