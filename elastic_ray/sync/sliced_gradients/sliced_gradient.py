"""Tensor type for ``.grad`` when a parameter's mean gradient is sliced over several ranks (torch).

A sliced gradient is a tensor without elements. Operations that need elements raise an error, so that a slice's result
is never mistaken for the entire gradient's result. All ranks know the gradient's 2-norm and whether it is finite, so
clipping and AMP's ``GradScaler`` work as usual, with the same result on every rank.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

ADDS_UP = (
    "a backward pass adds to gradients that an earlier one has reduced to the ranks that own their optimizer state: "
    "call optimizer.zero_grad() between the two, call backward() once on the sum of the losses, have all passes but "
    'the last within no_sync(), or use strategy="zero1". Reentrant checkpoints around all that is trained are a pass '
    "each: checkpoint with use_reentrant=False"
)
_WAITS = "is still being reduced: read it when backward() has returned"

_last_read: tuple[weakref.ref[Tensor], int, float] | None = None


def _number(factor: Any) -> float:
    """Return a factor as a number.

    Torch passes the clipping factor separately for each gradient, but it is read from the GPU only once.
    """
    global _last_read
    if not isinstance(factor, Tensor) or factor.is_inference():
        return float(factor)
    known = _last_read
    if known is None or known[0]() is not factor or known[1] != factor._version:
        known = _last_read = weakref.ref(factor), factor._version, float(factor)
    return known[2]


@dataclasses.dataclass(slots=True)
class Content:
    """Content of a sliced gradient: local slices, and the properties of the entire gradient known to all ranks."""

    # the slices that this rank owns, by first element
    parts: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    norm: float | None = None  # 2-norm of the whole; None where that is not known
    nonfinite: tuple[int, int] = (0, 0)  # how many elements are NaN, and how many infinite
    waits: bool = True  # whether it is still being reduced
    plain: Tensor | None = None  # an ordinary tensor that it has become, with zeros at first; nothing else counts then

    def know(self, squared_norm: float, nans: float, infinities: float) -> None:
        """Store the entire reduced gradient's squared norm, and its numbers of NaNs and infinities."""
        self.norm, self.nonfinite, self.waits = squared_norm**0.5, (int(nans), int(infinities)), False

    def become(self, plain: Tensor) -> None:
        """Turn the gradient into the ordinary tensor ``plain``."""
        self.waits, self.plain = False, plain

    def fill(self, number: float, count: int) -> None:
        """Set all elements of the gradient to ``number``; across all ranks, it has ``count`` elements."""
        for part in self.parts.values():
            part.fill_(number)
        self.norm = abs(number) * count**0.5
        self.nonfinite = (count * math.isnan(number), count * math.isinf(number))

    def multiply(self, factor: Any) -> None:
        """Multiply the gradient by a number."""
        number = _number(factor)
        for part in self.parts.values():
            part.mul_(factor)
        if self.norm is not None:
            self.norm *= abs(number)
        if not math.isfinite(number):
            self.nonfinite = (1, 0)

    def clamp(self, low: float | None, high: float | None) -> None:
        """Clamp every element to [low, high]; the norm becomes unknown, and infinities may remain if either is None."""
        for part in self.parts.values():
            part.clamp_(low, high)
        nans, infinities = self.nonfinite
        self.norm, self.nonfinite = None, (nans, infinities if low is None or high is None else 0)


class SlicedGradient(Tensor):
    """Tensor without elements that stands for ``.grad`` while the mean gradient is sliced over several ranks."""

    content: Content
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, param: Tensor, content: Content) -> SlicedGradient:
        """Create a wrapper tensor with the parameter's shape, dtype and device."""
        made: SlicedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device
        )
        return made

    def __init__(self, param: Tensor, content: Content) -> None:
        super().__init__()
        self.content = content

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        known = "still being reduced" if self.content.waits else f"norm {self.content.norm}"
        return f"SlicedGradient(shape {tuple(self.shape)}, {self.content.plain if self.is_plain else known})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedGradient:
        found = SlicedGradient(self, copy.deepcopy(self.content, memo))
        memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refused(self, "pickle")

    @property
    def is_plain(self) -> bool:
        """True if the gradient has become an ordinary tensor, by ``zero_grad(set_to_none=False)`` or a lost step."""
        return self.content.plain is not None

    @property
    def finite(self) -> bool:
        """True if all elements of the entire gradient, on all ranks, are finite."""
        content = self.content
        return bool(content.plain.isfinite().all()) if content.plain is not None else not any(content.nonfinite)

    def part(self, start: int, length: int) -> Tensor:
        """Return a slice of the gradient; this rank must own it.

        Raises RuntimeError if this rank does not own the slice because owners have changed since the reduction.
        """
        content = self.content
        if content.plain is not None:
            return content.plain.reshape(-1)[start : start + length]
        found = content.parts.get(start)
        if found is None or found.numel() != length:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(self.shape)} was reduced for other owners of its "
                "optimizer state than there are now: apply gradients in the step whose backward() has made them"
            )
        return found

    def clear(self) -> None:
        """Replace the gradient with a plain zero tensor after it is zeroed or its step is lost."""
        self.content.become(torch.zeros(self.shape, dtype=self.dtype, device=self.device))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Handle a torch operation on the gradient, or raise an error that suggests an alternative."""
        taken = tree_map_only(cls, plain_or_sliced, (args, dict(kwargs or {})))
        left = [each for each in tree_leaves(taken) if isinstance(each, cls)]
        if not left:
            result = func(*taken[0], **taken[1])
            return result if result is None or not func._schema.is_mutable else args[0]
        handler = _HANDLERS.get(func.overloadpacket)
        name = func.overloadpacket.__name__
        if handler is None or any(each.content.waits for each in left):
            raise _refused(left[0], name)
        try:
            return handler(args, *taken[0], **taken[1])
        except (TypeError, ValueError, NotImplementedError):
            raise _refused(left[0], name) from None


def plain_or_sliced(grad: Tensor) -> Tensor:
    """Return the ordinary tensor that a sliced gradient has become, and any other tensor unchanged."""
    if isinstance(grad, SlicedGradient) and grad.content.plain is not None:
        return grad.content.plain
    return grad


def _refused(grad: SlicedGradient, operation: str) -> RuntimeError:
    """Return the error for an operation that cannot be computed, with advice on what to do instead."""
    which = f"the gradient of a parameter of shape {tuple(grad.shape)}"
    if grad.content.waits:
        return RuntimeError(f"{which} {_WAITS}")
    if operation in ("add", "add_") and torch._C._current_graph_task_id() != -1:  # autograd accumulates so
        return RuntimeError(ADDS_UP)
    return RuntimeError(
        f"{which} lies in slices with the ranks that own its optimizer state, so that no rank can compute "
        f"{operation!r} of it: its 2-norm, clip_grad_norm_ by that, clip_grad_value_, GradScaler and products with "
        'a number can be had. Use strategy="zero1" for code that needs its elements, or another norm'
    )


# -- what can be computed: ``given`` are the arguments as torch gives them, the others with ordinary tensors for such


def _norm(
    given: Any, grad: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    whole = dim is None or sorted(each % grad.ndim for each in dim) == list(range(grad.ndim))
    if order != 2 or not whole or keepdim or grad.content.norm is None:
        raise ValueError("another norm")
    # torch.tensor() of a number on a GPU would wait for all that the GPU has yet to do.
    return torch.full((), grad.content.norm, dtype=dtype or grad.dtype, device=grad.device)


def _norms(given: Any, grads: Any, order: Any = 2, dtype: Any = None) -> list[Tensor]:
    def norm(grad: Any) -> Tensor:
        if isinstance(grad, SlicedGradient):
            return _norm(given, grad, order, dtype=dtype)
        found: Tensor = torch.linalg.vector_norm(grad, order, dtype=dtype)
        return found

    return [norm(grad) for grad in grads]


def _multiply(given: Any, grad: Any, factor: Any) -> Any:
    if isinstance(factor, Tensor) and factor.numel() != 1:
        raise ValueError("no number")
    if isinstance(grad, SlicedGradient):
        grad.content.multiply(factor)
    else:
        grad.mul_(factor)
    return given[0]


def _divide(given: Any, grad: Any, factor: Any) -> Any:
    if isinstance(factor, Tensor) and factor.numel() != 1:
        raise ValueError("no number")
    number = _number(factor)
    return _multiply(given, grad, 1.0 / number if number else math.copysign(math.inf, number))


def _for_all(divide_or_multiply: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], None]:
    """Return the handler for an operation on several gradients, with a factor for each or one for all."""

    def handle(given: Any, grads: Any, factors: Any) -> None:
        each = factors if isinstance(factors, (list, tuple)) else [factors] * len(grads)
        for grad, factor in zip(grads, each, strict=True):
            divide_or_multiply(given, grad, factor)

    return handle


def _clamp(given: Any, grad: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low, high = low if low is not None else min, high if high is not None else max
    if not all(each is None or isinstance(each, (int, float)) for each in (low, high)):
        raise ValueError("no numbers")
    grad.content.clamp(low, high)
    return given[0]


def _fill(given: Any, grad: Any, value: Any) -> Any:
    grad.content.fill(float(value), grad.numel())
    return given[0]


def _zero(given: Any, grad: Any) -> Any:
    if isinstance(grad, SlicedGradient):
        grad.clear()
    else:
        grad.zero_()
    return given[0]


def _zero_all(given: Any, grads: Any) -> None:
    for grad in grads:
        _zero(given, grad)


def _detach(given: Any, grad: Any) -> Any:
    return SlicedGradient(grad, grad.content)


def _unscale(given: Any, grads: Any, found: Tensor, inverse: Tensor) -> None:
    """Unscale all gradients like AMP's scaler, with the same outcome on all ranks."""
    others = [grad for grad in grads if not isinstance(grad, SlicedGradient)]
    if others:
        torch._amp_foreach_non_finite_check_and_unscale_(others, found, inverse)
    for grad in grads:
        if isinstance(grad, SlicedGradient):
            grad.content.multiply(inverse)
            if not grad.finite:
                found.fill_(1.0)


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_vector_norm: _norm,
    _aten._foreach_norm: _norms,
    _aten.mul_: _multiply,
    _aten.div_: _divide,
    _aten._foreach_mul_: _for_all(_multiply),
    _aten._foreach_div_: _for_all(_divide),
    _aten.clamp_: _clamp,
    _aten.fill_: _fill,
    _aten.zero_: _zero,
    _aten._foreach_zero_: _zero_all,
    _aten.detach: _detach,
    _aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
