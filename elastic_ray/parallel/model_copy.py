"""Detached copies of a wrapped model, and the description of a model for the job (torch)."""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

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
