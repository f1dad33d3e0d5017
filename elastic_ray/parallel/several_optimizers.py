"""Several optimizers of one model: what was given, sorted by optimizer, and numbers of the whole model (torch)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from elastic_ray.parallel.patches import complete
from elastic_ray.sync.engine.joint_optimizer import JointOptimizer
from placement.goodput.model import NoiseScale


def joined(module: torch.nn.Module, optimizer: Any) -> tuple[list[torch.optim.Optimizer], torch.optim.Optimizer]:
    """Return the optimizers that ``AdaptiveDataParallel`` was given for a model, and the same as one.

    Raises:
        TypeError: there is none, or something else.
        ValueError: several of them step one parameter.
    """
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in given:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, or a list of several, but got {type(each).__name__}; "
                "AdaptiveDataParallel(model, optimizer) needs both"
            )
        complete(each)
    if not given:
        raise TypeError("optimizer must be a torch.optim.Optimizer, or a list of several, but got an empty list")
    names = {id(p): name for name, p in module.named_parameters()}
    stepped: dict[int, int] = {}
    for number, each in enumerate(given):
        for p in (p for group in each.param_groups for p in group["params"]):
            if stepped.setdefault(id(p), number) != number:
                raise ValueError(
                    f"each parameter must be stepped by one optimizer, but {names.get(id(p), 'one')} is in optimizer "
                    f"{stepped[id(p)]} and in optimizer {number} of the list: give each optimizer parameters of its "
                    "own; what two losses train together is one optimizer's, which steps for their sum"
                )
    return given, given[0] if len(given) == 1 else JointOptimizer(given)


def schedulers_of(given: Any, optimizers: Sequence[torch.optim.Optimizer]) -> list[list[Any]]:
    """Return schedulers by the optimizer that they set the rates of; those that do not tell are the first's."""
    found: list[list[Any]] = [[] for _ in optimizers]
    places = {id(each): number for number, each in enumerate(optimizers)}
    for scheduler in given if isinstance(given, (list, tuple)) else [given]:
        if scheduler is not None:
            found[places.get(id(getattr(scheduler, "optimizer", None)), 0)].append(scheduler)
    return found


def joint_noise(
    whole: NoiseScale | None, parts: Sequence[tuple[Sequence[NoiseScale | None], int]]
) -> NoiseScale | None:
    """Return the noise scale of a model whose optimizers are measured in units of their own.

    None before there is an estimate.

    Each optimizer's parameters count by their number of elements n, in units where the gradient of one batch has the
    squared norm n, as Adam's preconditioned one has::

        sqr = sum n_i sqr_i / (sqr_i + var_i),    var = sum n_i var_i / (sqr_i + var_i)

    Args:
        whole: of all parameters together, which is it where there is one optimizer.
        parts: noise scale of each parameter group of an optimizer, and how many elements it steps.
    """
    if len(parts) == 1 or whole is None:
        return whole
    sqr = var = 0.0
    for groups, elements in parts:
        own = math.fsum(each.sqr for each in groups if each is not None)
        noise = math.fsum(each.var for each in groups if each is not None)
        if own + noise > 0:
            sqr, var = sqr + elements * own / (own + noise), var + elements * noise / (own + noise)
    return NoiseScale(sqr=sqr, var=var) if var > 0 else None
