"""Gradient statistics on flat buckets: what the synchronisation engine calls, a few kernels per bucket.

Every result is a tensor on the gradients' device and costs no synchronisation with the host until somebody
reads it. Values that are not finite (an overflow under AMP) pass through and are left out where they are
read: ``noise_scale.estimate_groups`` gives None for them.

Attention, replicas: a learning rate depends on these numbers, so ranks must compute them from identical
tensors (reduced gradients, reduced norms, optimizer state after the broadcast) or parameters drift apart.
Hence ``BucketPreconditioner.invalidate`` at every change of generation, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_ray.batch.device_numbers import as_real, real_count, with_steps_read

WARM_STEPS = 5
"""Steps before a second moment is worth dividing by; until then it counts as 1 (AdaptDL)."""

REFRESHED_EVERY = 16
"""Steps after which preconditioners are computed anew."""

LEAST_PART = 1e-2
"""Part of the root mean square of a parameter's denominators under which one counts as this."""

DENOMINATOR = "denominator"
"""Key of a state that holds what gradients are divided by, and nothing else."""


def squared_norm(flat: Tensor, precond: Tensor | None = None) -> Tensor:
    """||P g||^2 of a flat gradient g as a 0-dim tensor, in one dot product; P is diagonal, None = identity.

    Half-precision gradients are added up in float32. A loss scale c still in g gives c^2 times that.
    """
    weighted = _weighted(flat, precond)
    return torch.dot(weighted, weighted)


def _weighted(flat: Tensor, precond: Tensor | None) -> Tensor:
    flat = flat.detach()
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    if precond is None:
        return flat
    # On CPUs, a product of two types takes longer than a conversion and a product of one.
    return flat * (precond.to(flat.dtype) if precond.dtype == torch.bfloat16 else precond)


def compact(values: Tensor) -> Tensor:
    """What is kept of values until later steps: of those in single precision bfloat16, half the memory.

    The range is the same. Rounding by up to 2^-9 of each value adds 1e-6 of a gradient's squared norm to the variance
    that two of them show.
    """
    return values.to(torch.bfloat16) if values.dtype == torch.float32 else values


_State = Mapping[str, Any]


def _second_moment(state: _State, group: _State) -> Tensor:
    """Adam, AdamW, NAdam, RAdam: sqrt(v / (1 - beta2^t)) + eps; under AMSGrad v is the running maximum."""
    moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    betas = group.get("betas")
    correction = 1.0 - float(betas[1]) ** _step(state) if betas is not None else 1.0
    return torch.sqrt(moment / correction).add_(_eps(group))


def _rms(state: _State, group: _State) -> Tensor:
    """RMSprop: sqrt(v) + eps, less the squared mean where it is centred; its v has no bias correction."""
    moment = state["square_avg"]
    if "grad_avg" in state:
        moment = (moment - state["grad_avg"].square()).clamp_(min=0)
    return torch.sqrt(moment).add_(_eps(group))


def _infinity_norm(state: _State, group: _State) -> Tensor:
    """Adamax: u, which holds eps already."""
    return torch.as_tensor(state["exp_inf"])


def _sum_of_squares(state: _State, group: _State) -> Tensor:
    """Adagrad: sqrt(sum) + eps."""
    return torch.sqrt(state["sum"]).add_(_eps(group))


def _as_it_is(state: _State, group: _State) -> Tensor:
    """What other ranks have told."""
    return torch.as_tensor(state[DENOMINATOR])


_DENOMINATORS: dict[str, Callable[[_State, _State], Tensor]] = {
    DENOMINATOR: _as_it_is,
    "exp_avg_sq": _second_moment,
    "square_avg": _rms,
    "exp_inf": _infinity_norm,
    "sum": _sum_of_squares,
}
_ADAM_LIKE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
)


def is_adam_like(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer divides its step by a running size of the gradient, per coordinate.

    Known by class, or by its state (``exp_avg_sq``, ``square_avg``, ``exp_inf``) for optimizers from
    elsewhere. Adadelta (its steps have a size of their own) and Adafactor (its moments are factored) are not.
    """
    if isinstance(optimizer, _ADAM_LIKE):
        return True
    return any(_denominator(state) is not None for state in optimizer.state.values())


def _denominator(state: _State) -> Callable[[_State, _State], Tensor] | None:
    if "acc_delta" in state:
        return None
    return next((function for key, function in _DENOMINATORS.items() if isinstance(state.get(key), Tensor)), None)


def _eps(group: _State) -> float:
    """The group's eps; optimizers from elsewhere may have several under that name, or none."""
    eps = group.get("eps")
    return float(eps) if isinstance(eps, (int, float)) else 1e-8


def _step(state: _State) -> float:
    """Steps behind a state; optimizers that keep no count are taken to be warm."""
    return float(state.get("step", WARM_STEPS))


@torch.no_grad()
def preconditioner(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]) -> Tensor | None:
    """The flat diagonal 1 / (sqrt(v_hat) + eps) that the optimizer multiplies gradients with.

    Entry for entry as ``torch.cat([p.reshape(-1) for p in params])``, in float32 (float64 for float64
    parameters); the two parts of a complex number by themselves, as these optimizers take them. 1 for parameters
    with fewer than ``WARM_STEPS`` steps behind them. Coordinates that never had a gradient would count with up
    to 1 / eps = 1e8; denominators are therefore floored at a hundredth of their parameter's root mean square,
    so that one waking coordinate cannot pass for the whole gradient.

    Returns:
        None, the identity, where no parameter has second moments yet or the optimizer keeps none (SGD).
    """
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    states = with_steps_read([optimizer.state.get(p, {}) for p in params])
    pieces = [_piece(state, groups.get(id(p), {}), p) for state, p in zip(states, params, strict=True)]
    if all(piece is None for piece in pieces):
        return None
    dtype = torch.float64 if any(param.dtype.to_real() == torch.float64 for param in params) else torch.float32
    flat = torch.ones(sum(real_count(p) for p in params), dtype=dtype, device=params[0].device)
    position = 0
    for param, piece in zip(params, pieces, strict=True):
        if piece is not None:
            flat[position : position + real_count(param)].copy_(piece.reshape(-1))
        position += real_count(param)
    return flat


def _piece(state: _State, group: _State, param: torch.nn.Parameter) -> Tensor | None:
    size = denominators(state, group, param.dtype)
    return None if size is None else torch.reciprocal(torch.maximum(size, least_denominator(size)))


def denominators(state: _State, group: _State, dtype: torch.dtype) -> Tensor | None:
    """What the optimizer divides gradients of this type by, in float32 at least.

    Args:
        state: of the parameter, or rows of it; of many parameters as ``with_steps_read`` gives them.
        group: the optimizer's options.
        dtype: of the parameter.

    Returns:
        None where it divides by nothing, or not yet by anything of worth.
    """
    function = _denominator(state)
    if function is None or _step(state) < WARM_STEPS:
        return None
    parts = {key: as_real(value) if isinstance(value, Tensor) else value for key, value in state.items()}
    return function(parts, group).to(torch.promote_types(dtype.to_real(), torch.float32))


def least_denominator(size: Tensor) -> Tensor:
    """A hundredth of the root mean square, under which a denominator counts as this."""
    return size.square().mean().sqrt().mul_(LEAST_PART).clamp_(min=torch.finfo(size.dtype).tiny)


class BucketPreconditioner:
    """One bucket's preconditioner, recomputed every ``interval`` steps; in between it is the same.

    ``at(step)`` recomputes where step // interval changes, so ranks that count the same steps refresh
    together. It does not move with the optimizer's state in between; moments with beta2 = 0.999
    hardly do either.
    """

    def __init__(self, *, interval: int = REFRESHED_EVERY) -> None:
        if interval < 1:
            raise ValueError(f"interval must be 1 or more steps, but got {interval}")
        self._interval = interval
        self._round: int | None = None
        self._flat: Any = None

    def at(self, step: int, compute: Callable[[], Any]) -> Any:
        """The preconditioner for this step; None = identity.

        Args:
            step: number of the step.
            compute: makes it, as :func:`preconditioner`. It is not kept, and with it no bucket of a step's gradients.
        """
        current = step // self._interval
        # A fresh state must not stay the identity for a whole interval once the moments are warm.
        if current != self._round or (self._flat is None and step <= WARM_STEPS):
            found = compute()
            self._flat = compact(found) if isinstance(found, Tensor) else found
            self._round = current
        return self._flat

    def invalidate(self) -> None:
        """Forget it: for every rank, when the generation or the optimizer's state changes."""
        self._round = None
