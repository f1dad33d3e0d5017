"""Profile of a model and its optimizer for a strategy's planner (torch)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_ray.sync.engine.joint_optimizer import optimizers_of
from elastic_ray.sync.profile import ModelProfile, OptimizerInfo, ParamInfo
from elastic_ray.sync.tables.sparse_backward import switch_off

_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)
# A class derived from one of these may do anything.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def profile_of(
    module: torch.nn.Module, groups: Sequence[Sequence[torch.nn.Parameter]], optimizer: torch.optim.Optimizer
) -> ModelProfile:
    """The model's profile.

    Args:
        module: the model.
        groups: its trainable parameters by parameter group of the optimizer, in the model's order.
        optimizer: steps them.
    """
    for layer in module.modules():
        switch_off(layer)
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    layers = layers_by_parameter(module)
    params = [
        ParamInfo(
            names=tuple(names[id(param)]),
            shape=tuple(param.shape),
            dtype=str(param.dtype).removeprefix("torch."),
            itemsize=param.element_size(),
            device=param.device.type,
            group=index,
            sparse=any(getattr(layer, "sparse", False) for layer in layers[id(param)] if isinstance(layer, _TABLES)),
            table=all(isinstance(layer, _TABLES) for layer in layers[id(param)]),
            divisible=param.is_contiguous(),
        )
        for index, group in enumerate(groups)
        for param in group
    ]
    trained = {id(param) for group in groups for param in group}
    frozen = [name for key, all_names in names.items() if key not in trained for name in all_names]
    first, *others = optimizers = optimizers_of(optimizer)
    by_group = tuple(_describe(each) for each in optimizers for _ in each.param_groups) if others else ()
    return ModelProfile(params=tuple(params), optimizer=_describe(first), by_group=by_group, frozen=tuple(frozen))


def layers_by_parameter(module: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    """The layers that hold a parameter, by its ``id``."""
    layers: dict[int, list[torch.nn.Module]] = {}
    for layer in module.modules():
        for param in layer.parameters(recurse=False):
            layers.setdefault(id(param), []).append(layer)
    return layers


def _describe(optimizer: torch.optim.Optimizer) -> OptimizerInfo:
    """Describe the gradients that the optimizer can step; measured for torch's own with torch 2.13."""
    decays = any(group.get("weight_decay", 0) for group in optimizer.param_groups)
    takes = isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)) and not decays
    return OptimizerInfo(
        name=type(optimizer).__name__,
        takes_sparse=takes or isinstance(optimizer, torch.optim.SparseAdam),
        only_sparse=isinstance(optimizer, torch.optim.SparseAdam),
        elementwise=is_elementwise(optimizer),
    )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer is known to update each element independently of the others of its tensor."""
    return type(optimizer) in _ELEMENTWISE
