"""Gradient statistics on flat buckets: what the synchronisation engine calls, a few kernels per bucket.

Every result is a tensor on the gradients' device and costs no synchronisation with the host until somebody
reads it. Values that are not finite (an overflow under AMP) pass through and are left out where they are
read: ``noise_scale.estimate_groups`` and ``PairNorms.estimates`` give None for them.

Attention, replicas: a learning rate depends on these numbers, so ranks must compute them from identical
tensors (reduced gradients, reduced norms, optimizer state after the broadcast) or parameters drift apart.
Hence ``BucketPreconditioner.invalidate`` and ``SuccessiveGradients.reset`` at every change of generation, on
every rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from elastic_ray.batch.device_numbers import with_steps_read
from elastic_ray.batch.noise_scale import estimate_successive
from elastic_ray.batch.real_numbers import as_real, real_count
from placement.goodput.model import NoiseScale

WARM_STEPS = 5
"""Steps before a second moment is worth dividing by; until then it counts as 1 (AdaptDL)."""

REFRESHED_EVERY = 16
"""Steps after which preconditioners are computed anew."""

LEAST_PART = 1e-3
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
    return values.to(_compact_type(values))


def _compact_type(values: Tensor) -> torch.dtype:
    return torch.bfloat16 if values.dtype == torch.float32 else values.dtype


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
    to 1 / eps = 1e8; denominators are therefore floored at a thousandth of their parameter's root mean square,
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
    """A thousandth of the root mean square, under which a denominator counts as this."""
    return size.square().mean().sqrt().mul_(LEAST_PART).clamp_(min=torch.finfo(size.dtype).tiny)


class BucketPreconditioner:
    """One bucket's preconditioner, recomputed every ``interval`` steps; in between it is the same.

    Args:
        interval: steps.

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairNorms:
    """Norms of two consecutive gradients, on device.

    Attributes:
        sums: [parameter groups, 3]: ||g'||^2, ||g||^2 and <g', g> of each parameter group.
        batch_size: samples behind each of the two gradients.
    """

    sums: Tensor
    batch_size: int

    def estimates(self, init_batch_size: int) -> tuple[NoiseScale, ...] | None:
        """Raw noise scale per parameter group; None where a gradient was not finite. Waits for the device."""
        scale = self.batch_size / init_batch_size
        rows = self.sums.tolist()
        if not all(math.isfinite(value) for row in rows for value in row):
            return None
        return tuple(
            estimate_successive(prev_sq_norm=prev, sq_norm=now, dot=dot, scale=scale) for prev, now, dot in rows
        )


class PartialGradient(Protocol):
    """A flat gradient most of whose elements are zero. It does not change."""

    def pair_norms(self, previous: Any, precond: Any) -> Tensor:
        """||P g'||^2, ||P g||^2 and <P g', P g> with the previous gradient g', which is of its kind."""


FlatGradient: TypeAlias = Tensor | PartialGradient


class SuccessiveGradients:
    """Keeps the flat gradients of one step in ``every`` and pairs them with the next step's.

    Cost: half the size of the gradients in memory; per ``every`` steps one copy and three dot products per bucket.

    Per step, after backward and before ``optimizer.step``::

        if pairs.wants(step):
            for index, flat in enumerate(buckets):
                pairs.add(step, index, flat, batch_size=M, group=..., precond=..., grad_scale=...)
            norms = pairs.take()  # PairNorms at the second step of a pair, else None
    """

    def __init__(self, *, groups: int = 1, every: int = 8) -> None:
        if groups < 1:
            raise ValueError(f"groups must be 1 or more parameter groups, but got {groups}")
        if every < 2:
            raise ValueError(f"every must be 2 or more steps, as a pair takes two, but got {every}")
        self._groups = groups
        self._every = every
        self._kept: dict[int, tuple[FlatGradient, float | Tensor]] = {}
        self._first: tuple[int, int] | None = None  # step and batch size of the kept gradients
        self._rows: dict[int, tuple[int, Tensor]] = {}  # group and norms of each bucket of the pair's second step
        self._batch_size = 0

    def wants(self, step: int) -> bool:
        """Whether this step belongs to a pair."""
        return step % self._every in (0, 1)

    def add(
        self,
        step: int,
        bucket: int,
        flat: FlatGradient,
        *,
        batch_size: int,
        group: int = 0,
        precond: Any = None,
        grad_scale: float | Tensor = 1.0,
    ) -> None:
        """Take in one bucket of a step; no-op for steps that belong to no pair.

        Pairs whose steps do not follow each other or differ in batch size are dropped. A bucket that is added again
        in the same step (several backward passes) replaces what it held.

        Args:
            step: number of the step, counting up by one.
            bucket: any key of the bucket; its size must not change until ``reset``.
            flat: its gradient, flat, or what stands for it; a bucket of several parameter groups is added in pieces
                under different keys.
            batch_size: global batch M of the step.
            group: parameter group of the bucket.
            precond: diagonal preconditioner, the present one for both gradients; of the gradient's own kind.
            grad_scale: AMP's loss scale that is still in ``flat``; divided out.
        """
        phase = step % self._every
        if phase == 0:
            self._keep(step, bucket, flat, batch_size, grad_scale)
        elif phase == 1 and self._first == (step - 1, batch_size) and bucket in self._kept:
            previous, previous_scale = self._kept[bucket]
            row = _pair_norms(previous, flat, precond).to(torch.float32)
            self._rows[bucket] = group, row / _scales(previous_scale, grad_scale, row)
            self._batch_size = batch_size

    def _keep(self, step: int, bucket: int, flat: FlatGradient, batch_size: int, grad_scale: float | Tensor) -> None:
        """Keep the first gradient of a pair, in the memory of the one before where that fits."""
        if self._first != (step, batch_size):
            self._first, self._rows = (step, batch_size), {}
        old = self._kept[bucket][0] if bucket in self._kept else None
        buffer: FlatGradient = flat
        if isinstance(flat, Tensor):
            dtype = _compact_type(flat)
            fits = isinstance(old, Tensor) and old.shape == flat.shape and old.dtype == dtype
            buffer = old.copy_(flat) if isinstance(old, Tensor) and fits else flat.detach().to(dtype, copy=True)
        # The scaler changes its tensor in place.
        self._kept[bucket] = (buffer, grad_scale.clone() if isinstance(grad_scale, Tensor) else grad_scale)

    def take(self) -> PairNorms | None:
        """The norms of a pair just completed, once; None in between."""
        if not self._rows:
            return None
        sums = torch.zeros(self._groups, 3, dtype=torch.float32, device=next(iter(self._rows.values()))[1].device)
        for group, row in self._rows.values():
            sums[group] += row.to(sums.device)
        self._rows, self._first = {}, None
        return PairNorms(sums=sums, batch_size=self._batch_size)

    def reset(self) -> None:
        """Drop kept gradients and their memory: when replicas join, or parameters change by other means."""
        self._kept.clear()
        self._rows, self._first = {}, None


def _pair_norms(previous: FlatGradient, flat: FlatGradient, precond: Any) -> Tensor:
    """See ``PartialGradient``."""
    if not isinstance(flat, Tensor):
        return flat.pair_norms(previous, precond)
    assert isinstance(previous, Tensor)
    u, v = _weighted(previous, precond), _weighted(flat, precond)
    return torch.stack((torch.dot(u, u), torch.dot(v, v), torch.dot(u, v)))


def _scales(previous: float | Tensor, now: float | Tensor, like: Tensor) -> Tensor:
    """c'^2, c^2 and c' c, the factors by which loss scales c' and c have blown up the three norms."""
    p, n = (torch.as_tensor(c, dtype=like.dtype, device=like.device).reshape(()) for c in (previous, now))
    return torch.stack((p * p, n * n, p * n))
