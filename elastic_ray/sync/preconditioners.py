"""Gradient statistics on flat buckets for the synchronisation engine, using a few kernels per bucket.

Every result is a tensor on the gradients' device, so the host does not wait for the device until it reads one.
Non-finite values (an overflow under AMP) pass through and are discarded on reading:
``noise_scale.estimate_groups`` returns None for them.

Learning rates depend on these statistics. All ranks must therefore compute them from identical tensors (reduced
gradients, reduced norms, optimizer state after the broadcast); otherwise their parameters diverge. For this
reason, every rank calls ``BucketPreconditioner.invalidate`` at every change of generation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_ray.sync.device_numbers import as_real, local, real_count, with_steps_read

WARM_STEPS = 5
"""Steps before a second moment is worth dividing by; until then it counts as 1 (AdaptDL)."""

REFRESHED_EVERY = 16
"""Steps after which preconditioners are computed anew."""

SETTLED_STEPS = 2 * REFRESHED_EVERY
"""Steps in which moments move too fast for denominators that are sent to others to be used in several steps."""

LEAST_PART = 1e-2
"""Part of the root mean square of a parameter's denominators under which one counts as this."""

LEAST_AT_ONCE = 1 << 14
AT_ONCE = 1 << 16, 1 << 23
"""Denominators that are in memory together on a CPU, where they stay in its cache, and on a GPU."""

DENOMINATOR = "denominator"
"""Key of a state that holds what gradients are divided by, and nothing else."""


def squared_norm(flat: Tensor, precond: Tensor | FlatPreconditioner | None = None) -> Tensor:
    """Return ||P g||^2 of a flat gradient g as a 0-dim tensor, for a diagonal preconditioner P (None: identity).

    Half-precision gradients are summed in float32. If g is still multiplied by a loss scale c, the result is multiplied
    by c^2.
    """
    flat = flat.detach()
    if isinstance(precond, FlatPreconditioner):
        return precond.squared_norm(flat)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    weighted = flat if precond is None else flat * precond
    return torch.dot(weighted, weighted)


def compact(values: Tensor) -> Tensor:
    """Return a tensor in the dtype used to store it for later steps: bfloat16 instead of float32.

    Bfloat16 has the same range. Rounding each value by up to 2^-9 adds 1e-6 of a gradient's squared norm to the
    variance between two gradients.
    """
    return values.to(torch.bfloat16) if values.dtype == torch.float32 else values


_State = Mapping[str, Any]
_States = Sequence[_State]


def _second_moment(states: _States, groups: _States) -> list[Tensor]:
    """Return sqrt(v / (1 - beta2^t)) + eps for Adam, AdamW, NAdam, RAdam; under AMSGrad v is the running maximum."""
    moments = [state.get("max_exp_avg_sq", state["exp_avg_sq"]) for state in states]
    corrections = [
        1.0 - float(group["betas"][1]) ** _step(state) if group.get("betas") is not None else 1.0
        for state, group in zip(states, groups, strict=True)
    ]
    found = torch._foreach_div(moments, corrections)
    torch._foreach_sqrt_(found)
    torch._foreach_add_(found, [_eps(group) for group in groups])
    return list(found)


def _rms(states: _States, groups: _States) -> list[Tensor]:
    """Return sqrt(v) + eps for RMSprop, minus the squared mean if centred; its v has no bias correction."""
    moments = [
        (state["square_avg"] - state["grad_avg"].square()).clamp_(min=0) if "grad_avg" in state else state["square_avg"]
        for state in states
    ]
    found = torch._foreach_sqrt(moments)
    torch._foreach_add_(found, [_eps(group) for group in groups])
    return list(found)


def _infinity_norm(states: _States, groups: _States) -> list[Tensor]:
    """Return u for Adamax, which already includes eps."""
    return list(torch._foreach_add([state["exp_inf"] for state in states], 0.0))


def _sum_of_squares(states: _States, groups: _States) -> list[Tensor]:
    """Return sqrt(sum) + eps for Adagrad."""
    found = torch._foreach_sqrt([state["sum"] for state in states])
    torch._foreach_add_(found, [_eps(group) for group in groups])
    return list(found)


def _as_it_is(states: _States, groups: _States) -> list[Tensor]:
    """Return copies of the denominators sent by other ranks."""
    return list(torch._foreach_add([state[DENOMINATOR] for state in states], 0.0))


# Finds denominators in memory of their own.
_Function = Callable[[_States, _States], list[Tensor]]
_DENOMINATORS: dict[str, _Function] = {
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


_USED = {*_DENOMINATORS, "max_exp_avg_sq", "grad_avg"}


def is_adam_like(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer divides each gradient element by a running estimate of its size.

    Such optimizers are recognised by class or, for other libraries' optimizers, by their state (``exp_avg_sq``,
    ``square_avg``, ``exp_inf``). Adadelta (which sets its own step size) and Adafactor (which factors its moments) do
    not count as Adam-like.
    """
    if isinstance(optimizer, _ADAM_LIKE):
        return True
    return any(_denominator(state) is not None for state in optimizer.state.values())


def _denominator(state: _State) -> _Function | None:
    if "acc_delta" in state:
        return None
    return next((function for key, function in _DENOMINATORS.items() if isinstance(state.get(key), Tensor)), None)


def _eps(group: _State) -> float:
    """Return the group's eps; 1e-8 for other libraries' optimizers, which may have several eps values or none."""
    eps = group.get("eps")
    return float(eps) if isinstance(eps, (int, float)) else 1e-8


def _step(state: _State) -> float:
    """Return a state's number of steps; optimizers that keep no count are assumed to be warm."""
    return float(state.get("step", WARM_STEPS))


@torch.no_grad()
def preconditioner(optimizer: Any, params: Sequence[torch.nn.Parameter]) -> FlatPreconditioner | None:
    """Return the flat diagonal 1 / (sqrt(v_hat) + eps) that the optimizer multiplies gradients by.

    The diagonal is 1 for parameters with fewer than ``WARM_STEPS`` steps. An element that has never had a gradient
    would have a factor of up to 1 / eps = 1e8 and, once active, dominate the entire gradient. Denominators are
    therefore floored at a hundredth of the root mean square of their parameter's denominators.

    Returns None (the identity) if no parameter has second moments yet or the optimizer keeps none (SGD).
    """
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    states = with_steps_read([optimizer.state.get(p, {}) for p in params])
    functions = [_denominator(state) if _step(state) >= WARM_STEPS else None for state in states]
    if not any(functions):
        return None
    made = [groups.get(id(p), {}) for p in params]
    return FlatPreconditioner(optimizer, params, made, functions, [_step(state) for state in states])


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Elements ``start`` to ``stop`` of a parameter's real numbers."""

    place: int
    start: int
    stop: int


class FlatPreconditioner:
    """Diagonal preconditioner of a flat gradient, computed on demand; see :func:`preconditioner`.

    Only a floor per parameter is stored; denominators are computed in chunks from the optimizer's current state, in the
    order of ``torch.cat([p.reshape(-1) for p in params])``. The real and imaginary parts of complex numbers are
    separate elements, just as in these optimizers.

    Args:
        functions: Function that computes the denominators, for each parameter; None if they are 1.
    """

    def __init__(
        self,
        optimizer: Any,
        params: Sequence[torch.nn.Parameter],
        groups: _States,
        functions: Sequence[_Function | None],
        steps: Sequence[float],
    ) -> None:
        self._optimizer, self.params, self._groups = optimizer, params, groups
        self._places = {id(param): place for place, param in enumerate(params)}
        self._functions, self._steps = functions, steps
        self._elapsed = 0
        self._counts = [real_count(local(p)) for p in params]
        self._dtype = torch.promote_types(torch.float32, params[0].dtype.to_real())
        self._device = params[0].device
        self._floors: list[Tensor] = []
        self._parts = list(self._cut(0, sum(self._counts)))
        self._floors = self._find_floors()

    def advance_to(self, elapsed: int) -> None:
        """Assume that ``elapsed`` steps have been made for all parameters since this object was created.

        Reading step counts instead could block on the GPU.
        """
        self._elapsed = elapsed

    def _cut(self, first: int, last: int) -> Iterator[list[_Piece]]:
        """Yield elements ``first`` to ``last`` of the flat gradient, in chunks of pieces."""
        room = min(AT_ONCE[self._device.type != "cpu"], max(sum(self._counts) >> 5, LEAST_AT_ONCE))
        part, size, at = list[_Piece](), 0, 0
        for place, count in enumerate(self._counts):
            start, stop = max(0, first - at), min(count, last - at)
            at += count
            while start < stop:
                upto = min(stop, start + room - size)
                part.append(_Piece(place, start, upto))
                size += upto - start
                start = upto
                if size == room:
                    yield part
                    part, size = [], 0
        if part:
            yield part

    def _denominators(self, part: Sequence[_Piece]) -> list[Tensor]:
        """Return each piece's denominators as a vector, with a lower bound for each parameter."""
        found: list[Tensor] = [torch.empty(0)] * len(part)
        by_function: dict[_Function, list[int]] = {}
        for number, piece in enumerate(part):
            function = self._functions[piece.place]
            if function is None:
                found[number] = torch.ones(piece.stop - piece.start, dtype=self._dtype, device=self._device)
            else:
                by_function.setdefault(function, []).append(number)
        for function, numbers in by_function.items():
            sizes = function(
                [self._state(part[number]) for number in numbers],
                [self._groups[part[number].place] for number in numbers],
            )
            for number, size in zip(numbers, sizes, strict=True):
                found[number] = size.to(self._dtype)
        if self._floors:
            torch._foreach_clamp_min_(found, [self._floors[piece.place] for piece in part])
        return found

    def _state(self, piece: _Piece) -> _State:
        """Return a piece's optimizer state."""
        found: dict[str, Any] = {"step": self._steps[piece.place] + self._elapsed}
        for key, value in self._optimizer.state[self.params[piece.place]].items():
            if key in _USED and isinstance(value, Tensor):
                found[key] = as_real(local(value)).reshape(-1)[piece.start : piece.stop]
        return found

    def _find_floors(self) -> list[Tensor]:
        """Return each parameter's floor: a hundredth of its denominators' root mean square."""
        norms: list[list[Tensor]] = [[] for _ in self.params]
        for part in self._parts:
            for piece, norm in zip(part, torch._foreach_norm(self._denominators(part)), strict=True):
                norms[piece.place].append(norm)
        nothing = torch.zeros((), dtype=self._dtype, device=self._device)  # of a parameter without elements
        whole = [torch.stack(each).norm() if len(each) > 1 else (each or [nothing])[0] for each in norms]
        found = torch._foreach_mul(whole, [LEAST_PART / max(1, count) ** 0.5 for count in self._counts])
        torch._foreach_clamp_min_(found, torch.finfo(self._dtype).tiny)
        return list(found)

    @torch.no_grad()
    def factors_of(self, parts: Sequence[tuple[Tensor, Callable[[Tensor], Tensor]]]) -> list[Tensor | None]:
        """Return the preconditioner's factors for parts of parameters; None for a part with factors that are all 1.

        Args:
            parts: Parameters, each with a function that cuts its part out of a tensor with the parameter's shape.
        """
        found: list[Tensor | None] = [None] * len(parts)
        by_function: dict[_Function, list[int]] = {}
        places = [self._places[id(param)] for param, _ in parts]
        for number, place in enumerate(places):
            if (function := self._functions[place]) is not None:
                by_function.setdefault(function, []).append(number)
        for function, numbers in by_function.items():
            states = list[dict[str, Any]]()
            for number in numbers:
                param, cut = parts[number]
                own = self._optimizer.state[param].items()
                known = {k: cut(v.view(param.shape)) for k, v in own if k in _USED and isinstance(v, Tensor)}
                states.append({"step": self._steps[places[number]] + self._elapsed, **known})
            sizes = function(states, [self._groups[places[number]] for number in numbers])
            sizes = [size.to(self._dtype) for size in sizes]
            torch._foreach_clamp_min_(sizes, [self._floors[places[number]] for number in numbers])
            torch._foreach_reciprocal_(sizes)
            for number, size in zip(numbers, sizes, strict=True):
                found[number] = size
        return found

    @torch.no_grad()
    def squared_norms(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Return ||P g||^2 for each gradient; ``params`` may be a subset of the preconditioner's parameters."""
        flat = {self._places[id(p)]: as_real(grad.detach()).reshape(-1) for p, grad in zip(params, grads, strict=True)}
        found: dict[int, list[Tensor]] = {place: [] for place in flat}
        for part in self._parts:
            if pieces := [each for each in part if each.place in flat]:
                mine = [flat[each.place][each.start : each.stop] for each in pieces]
                scaled = torch._foreach_div(mine, self._denominators(pieces))
                for piece, norm in zip(pieces, torch._foreach_norm(scaled), strict=True):
                    found[piece.place].append(norm)
        return [torch.stack(each).square().sum() if len(each) > 1 else each[0].square() for each in found.values()]

    @torch.no_grad()
    def squared_norm(self, flat: Tensor, start: int = 0) -> Tensor:
        """Return ||P g||^2 for a section of the flat gradient that starts at element ``start``."""
        found = torch.zeros((), dtype=self._dtype, device=flat.device)
        whole = not start and len(flat) == sum(self._counts)
        at = 0
        for part in self._parts if whole else self._cut(start, start + len(flat)):
            sizes = self._denominators(part)
            size = torch.cat(sizes) if len(sizes) > 1 else sizes[0]
            weighted = size.reciprocal_().mul_(flat[at : at + len(size)])
            at += len(size)
            found += torch.dot(weighted, weighted)
        return found


def denominators(state: _State, group: _State, dtype: torch.dtype) -> Tensor | None:
    """Return the values that an optimizer divides gradients by, for the given dtype, in float32 or wider.

    Args:
        state: State of the parameter or of some of its rows; if there are many parameters, get it from
            ``with_steps_read``.

    Returns None if the optimizer does not divide gradients, or has made fewer than ``WARM_STEPS`` steps.
    """
    function = _denominator(state)
    if function is None or _step(state) < WARM_STEPS:
        return None
    parts = {key: as_real(value) if isinstance(value, Tensor) else value for key, value in state.items()}
    return function([parts], [group])[0].to(torch.promote_types(dtype.to_real(), torch.float32))


def least_denominator(size: Tensor) -> Tensor:
    """Return the lower bound of a parameter's denominators: a hundredth of their root mean square."""
    return size.square().mean().sqrt().mul_(LEAST_PART).clamp_(min=torch.finfo(size.dtype).tiny)


class BucketPreconditioner:
    """Preconditioner of one bucket, recomputed every ``REFRESHED_EVERY`` steps.

    :meth:`at` recomputes it in the first steps and whenever step // ``REFRESHED_EVERY`` changes. Ranks with equal step
    counts therefore recompute it in the same steps.
    """

    def __init__(self) -> None:
        self._round: int | None = None
        self._found_at = 0
        self._found: Any = None

    def at(self, step: int, find: Callable[[], Any]) -> Any:
        """Return the preconditioner for this step; None means the identity.

        Args:
            find: Computes the preconditioner, like :func:`preconditioner`. The function is not stored, because it
                would keep a bucket of the step's gradients alive.
        """
        current = step // REFRESHED_EVERY
        if current != self._round or step <= SETTLED_STEPS:
            self._found, self._round, self._found_at = find(), current, step
        if isinstance(self._found, FlatPreconditioner):
            self._found.advance_to(step - self._found_at)
        return self._found

    def invalidate(self) -> None:
        """Discard the preconditioner. Call this on every rank when the generation or the optimizer's state changes."""
        self._round = self._found = None
