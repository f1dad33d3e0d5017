"""Correction of Adam's second moments to the whole batch, on ranks that step with their share's gradient (torch).

A share's gradient has more noise, which enlarges v. Without the correction, the steps of all ranks, and their mean,
would be shorter than under all-reduce.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from elastic_ray.sync.device_numbers import as_real, local, with_steps_read

_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
_MOST = 1 - 2**-6  # with all of g^2 taken out, rounding could leave a negative number


def weight(shares: float, beta1: float, step: float) -> float:
    """Return the weight w such that (1 - w) g^2 + w m^2 has the same expected value as the whole batch's G^2.

    Here, g is the gradient of one rank's share, and G is the mean of K such gradients. m is Adam's bias-corrected first
    moment after t steps, an average of past gradients g: E[g^2] = s + n, E[G^2] = s + n / K, and E[m^2] = s + a n with
    a = (1 - beta1) / (1 + beta1) (1 + beta1^t) / (1 - beta1^t), if s, the square of the expected gradient, changes
    slowly. So w = (1 - 1 / K) / (1 - a), at most 63/64.

    Args:
        shares: K, the size of the whole batch divided by the size of one rank's share.
        step: t, at least 1.
    """
    power = beta1**step
    a = (1 - beta1) / (1 + beta1) * (1 + power) / (1 - power)
    return min(_MOST, (1 - 1 / shares) / (1 - a)) if a < 1 else _MOST


@torch.no_grad()
def scale_moments(optimizer: torch.optim.Optimizer, shares: float) -> None:
    """Correct Adam's second moments for the whole batch's gradient, after a step on one rank's share.

    In the latest contribution to v, the share's g^2 is replaced by an estimate of the whole batch's G^2. Nothing
    changes for optimizers outside the Adam family, for subclasses, for parameter groups that add weight decay to the
    gradient, or after a fused step under AMP, which may have been skipped.

    Args:
        shares: Size of the whole batch / size of the share that the gradient was computed from.
    """
    if type(optimizer) not in _KINDS or shares <= 1 or getattr(optimizer, "found_inf", None) is not None:
        return
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        if group["weight_decay"] and not (decoupled or group.get("decoupled_weight_decay")):
            continue
        beta1, beta2 = map(float, group["betas"])
        params = [p for p in group["params"] if p.grad is not None and "exp_avg_sq" in optimizer.state.get(p, ())]
        kinds: dict[float, list[tuple[Any, Any]]] = {}
        for p, state in zip(params, with_steps_read([optimizer.state[p] for p in params]), strict=True):
            kinds.setdefault(float(state["step"]), []).append((p.grad, state))
        for step, members in kinds.items():
            share = (1 - beta2) * weight(shares, beta1, step)
            second, first = _reals(members, "exp_avg_sq"), _reals(members, "exp_avg")
            gradients = [as_real(local(gradient)) for gradient, _ in members]
            torch._foreach_addcmul_(second, first, first, value=share / (1 - beta1**step) ** 2)
            torch._foreach_addcmul_(second, gradients, gradients, value=-share)
            for v, m in zip(second, first, strict=True):
                v.masked_fill_(v.isnan() & ~m.isnan(), math.inf)  # v had overflowed, and g^2 has, too


def _reals(members: list[tuple[Any, Any]], key: str) -> list[Tensor]:
    return [as_real(local(state[key])) for _, state in members]
