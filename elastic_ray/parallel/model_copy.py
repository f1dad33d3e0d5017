"""Copies of a model that is trained in a group: the weights of one moment, which nothing trains (torch)."""

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
    """Copy of an ``AdaptiveDataParallel``, as ``copy.deepcopy``, pickle and ``AveragedModel`` make it.

    It is called as that, and its state dict has the same names. It belongs to no run: its gradients are not reduced,
    and no worker but its own knows of it::

        best = copy.deepcopy(model)
        torch.save(best.state_dict(), "best.pt")
    """

    elastic_ray_wraps = True

    def __init__(self, module: torch.nn.Module, training: bool) -> None:
        super().__init__()
        self.module = module
        self.training = training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: a copy reduces no gradients."""
        return nullcontext()


def copied(module: torch.nn.Module, training: bool) -> tuple[type[ModelCopy], tuple[torch.nn.Module, bool]]:
    """Return how to make a copy, as ``__reduce_ex__`` does.

    Raises TypeError: parts of the model lie with other workers.
    """
    tables = [name for name, each in module.named_modules() if isinstance(each, ShardedEmbedding)]
    if tables or is_sharded_model(module):
        what = f"the rows of {tables[0]} (ShardedEmbedding)" if tables else "its parameters (fully_shard)"
        raise TypeError(
            f"a model of {type(module).__name__} cannot be copied or pickled, since {what} lie with several workers: "
            "call state_dict() on all of them, and keep what rank 0 has, or load it into a model that is built anew"
        )
    return ModelCopy, (module, training)


# Its names have the prefix "module." for whoever looks for that, as torch.distributed.checkpoint.state_dict does.
torch.nn.parallel.DistributedDataParallel.register(ModelCopy)


def describe_model(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, *, amp: bool, strategy: object = None
) -> ModelInfo:
    """A wrapped model.

    Args:
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
