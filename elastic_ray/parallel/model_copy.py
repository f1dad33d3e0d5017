"""Detached copies of a wrapped model, its floating-point operations, and its GPU's peak performance (torch)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from elastic_ray.batch.reports import ModelInfo
from elastic_ray.sync.builders import AllReduce
from elastic_ray.sync.sharded.embedding import ShardedEmbedding
from elastic_ray.sync.sharded_parameters.model_checks import is_sharded_model


class ModelCopy(torch.nn.Module):
    """Detached copy of an ``AdaptiveDataParallel``, as made by ``copy.deepcopy``, pickle and ``AveragedModel``.

    The copy is called like the original, and its state dict has the same names. It belongs to no run: its gradients are
    not reduced, and other workers do not know of it::

        best = copy.deepcopy(model)
        torch.save(best.state_dict(), "best.pt")
    """

    elastic_ray_wraps = True

    def __init__(self, module: torch.nn.Module, training: bool) -> None:
        super().__init__()
        self.module, self.training = module, training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because a copy reduces no gradients."""
        return nullcontext()


def copied(module: torch.nn.Module, training: bool) -> tuple[type[ModelCopy], tuple[torch.nn.Module, bool]]:
    """Return the class and arguments that reconstruct a copy of the module, as ``__reduce_ex__`` requires.

    Raises TypeError if other workers hold parts of the model.
    """
    tables = [name for name, each in module.named_modules() if isinstance(each, ShardedEmbedding)]
    if tables or is_sharded_model(module):
        what = f"the rows of {tables[0]} (ShardedEmbedding)" if tables else "its parameters (fully_shard)"
        raise TypeError(
            f"a model of {type(module).__name__} cannot be copied or pickled, since {what} lie with several workers: "
            "call state_dict() on all of them, and keep what rank 0 has, or load it into a newly built model"
        )
    return ModelCopy, (module, training)


# Its names have the prefix "module." for whoever looks for that, as torch.distributed.checkpoint.state_dict does.
torch.nn.parallel.DistributedDataParallel.register(ModelCopy)


def describe_model(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, amp: bool, strategy: object = None
) -> ModelInfo:
    """Return the model's class name, and a hash of its parameters, optimizer, AMP use and strategy."""
    lines = [type(module).__qualname__, type(optimizer).__qualname__, f"amp={amp}"]
    lines += [
        f"{name} {tuple(param.shape)} {param.dtype} {param.requires_grad}" for name, param in module.named_parameters()
    ]
    if strategy is not None and strategy != AllReduce():
        lines.append(repr(strategy) if dataclasses.is_dataclass(strategy) else type(strategy).__qualname__)
    return ModelInfo(kind=type(module).__name__, details=hashlib.sha256("\n".join(lines).encode()).hexdigest())


PEAK_FLOPS: Mapping[str, float] = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense peak in half precision [FLOP/s] by words of a device's name, longer ones first; from NVIDIA's data sheets."""

_MOST_SHAPES = 4


def peak_of(name: str) -> float | None:
    """Return the dense half-precision peak [FLOP/s] of the GPU called ``name``; None for an unknown GPU."""
    words = name.replace("-", " ").split()
    for known, peak in PEAK_FLOPS.items():
        if all(word in words for word in known.split()):
            return peak
    return None


class ForwardFlops:
    """Counter of a model's floating-point operations in a forward pass, for the first few input shapes.

    Attributes:
        per_sample: Number of operations per sample, for the latest shape that was counted; None before the first.
    """

    def __init__(self) -> None:
        self.per_sample: float | None = None
        self._shapes: set[tuple[int, ...]] = set()

    def call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the module's forward pass and return its output; if the input shape is new, count the operations."""
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        shape = tuple(first.shape) if first is not None else ()
        if not shape or shape in self._shapes or len(self._shapes) >= _MOST_SHAPES:
            return module(*args, **kwargs)
        self._shapes.add(shape)
        with FlopCounterMode(display=False) as counter:
            output = module(*args, **kwargs)
        total = counter.get_total_flops()
        self.per_sample = total / shape[0] if total and shape[0] else self.per_sample
        return output
