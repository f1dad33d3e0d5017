"""An optimizer that steps parts of its parameters, with their state, in place of the parameters (torch)."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Parameter

from elastic_ray.sync.optimizer_tiles.states import State


@contextmanager
def swapped(
    optimizer: torch.optim.Optimizer,
    hidden: Collection[int],
    shown: Sequence[tuple[Parameter, int]],
    states: dict[Parameter, State],
) -> Iterator[None]:
    """Have the optimizer hold other parameters within; its groups' options are the same objects.

    Args:
        optimizer: it.
        hidden: ``id`` of the parameters that it does not hold.
        shown: what it holds in their place, each with the position of its group.
        states: of these; brought up to date.
    """
    groups, state = optimizer.param_groups, optimizer.state
    kept = [group["params"] for group in groups]
    merged: collections.defaultdict[Any, Any] = collections.defaultdict(dict, state)
    merged.update({param: states[param] for param, _ in shown if states.get(param)})
    try:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = [param for param in params if id(param) not in hidden]
        for param, number in shown:
            groups[number]["params"].append(param)
        # Some optimizers do not bear a group without parameters.
        optimizer.param_groups = [group for group in groups if group["params"]]
        optimizer.state = merged
        yield
    finally:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params
        optimizer.param_groups, optimizer.state = groups, state
        for param, _ in shown:
            states[param] = merged.pop(param, {})
        state.update(merged)
