"""Optimizers that step by another one inside, as SAM and Lookahead do (torch)."""

from __future__ import annotations

import torch


def complete(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that leaves ``Optimizer.__init__`` out, as some Lookaheads do, the hooks of torch.

    Raises:
        TypeError: it lacks what every optimizer has; the message names it.
    """
    missing = [name for name in ("param_groups", "state", "defaults") if not hasattr(optimizer, name)]
    if missing:
        raise TypeError(
            f"optimizer must have {', '.join(missing)}, but {type(optimizer).__name__} has not: call "
            "super().__init__(params, defaults) in its __init__, or set them there"
        )
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        torch.optim.Optimizer.__setstate__(optimizer, {})


def inner_optimizers(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that another one keeps as attributes and that have a state of their own, by attribute."""
    return {
        name: each
        for name, each in vars(optimizer).items()
        if isinstance(each, torch.optim.Optimizer) and each is not optimizer and each.state is not optimizer.state
    }
