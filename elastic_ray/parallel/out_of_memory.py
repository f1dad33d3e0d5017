"""Recovery of a wrapped model that runs out of memory: the step is lost, and its batch is drawn again (torch).

An exception that leaves the user's loop could only be handled by restarting the job. Errors are therefore caught at
their source: in the model's forward pass, in ``backward()`` and in ``optimizer.step()``. User code then gets outputs of
the right shape, zero gradients and an optimizer that does not step, and the loader draws the batch again in smaller
micro-batches. Errors in the user's own computations in between (a loss) are raised as usual.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from elastic_ray.consensus.intents import RanksDisagreeError
from elastic_ray.steps.out_of_memory import EvaluationMemoryError, is_out_of_memory, let_go
from placement.text import count

_TOLERANCE = 0.01  # of the largest value: what is computed in half precision depends on the batch by less
_DIFFERS = (
    "the model runs out of memory, and its output for a part of a batch differs from that for the whole batch: "
    "evaluate with smaller batches"
)


def lost_output(
    module: torch.nn.Module, args: Any, kwargs: Any, params: Sequence[Tensor], *, forward: Any = None
) -> Any:
    """Return an output of ``module`` for a step abandoned for lack of memory.

    It gives zero gradients to ``params``, and to arguments that require gradients.

    Raises:
        torch.OutOfMemoryError: Not even a single sample fits, or the arguments cannot be split.
    """
    output = in_parts(module, args, kwargs, exact=False, forward=forward)
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor) and each.requires_grad]
    ends = [*params, *given] or [torch.zeros((), requires_grad=True)]
    return _mapped(lambda column: _through(column[0], ends) if _is_real(column[0]) else column[0], [output])


def evaluated_in_parts(
    module: torch.nn.Module, args: Any, kwargs: Any, *, agree: Callable[[int], None] | None, forward: Any, samples: int
) -> Any:
    """Return the output that ``module`` gives without gradients; see :func:`in_parts`.

    Raises:
        EvaluationMemoryError: Not even one sample fits, or arguments or output cannot be split. It has ``samples``.
    """
    try:
        return in_parts(module, args, kwargs, exact=True, agree=agree, forward=forward)
    except torch.OutOfMemoryError as error:
        lack = EvaluationMemoryError(str(error))
        lack.samples = samples
        raise lack from error


def in_parts(
    module: torch.nn.Module,
    args: Any,
    kwargs: Any,
    *,
    exact: bool,
    agree: Callable[[int], None] | None = None,
    forward: Any = None,
) -> Any:
    """Return the output of ``module`` without an autograd graph, computed in halves of the batch, quarters, and so on.

    Args:
        exact: If True, the output must equal the output for all samples at once. Scalar outputs such as a mean over
            samples are therefore refused, and outputs for two samples that differ from those for each of them alone.
            If False, scalar outputs are averaged over the parts.
        agree: Called with the number of parts before ``module`` is called for them; a sharded model's ranks call it
            together.
        forward: The module's own attribute ``forward`` when it was called for the whole batch; None if it had none.
            Lightning sets one for a single call, which runs a training step.

    Raises:
        torch.OutOfMemoryError: Not even one sample fits, or arguments or output cannot be split.
    """
    leaves, spec = tree_flatten((args, kwargs))
    samples = next((len(each) for each in leaves if isinstance(each, Tensor) and each.dim() > 0), 0)

    def computed(sizes: Sequence[int]) -> list[Any]:
        """Return the output for parts of these sizes, in a list; an empty list if memory runs out."""
        if agree is not None:
            agree(len(sizes))
        outputs, at = list[Any](), 0
        try:
            with torch.no_grad():
                for size in sizes:
                    part = [each[at : at + size] if _is_of(each, samples) else each for each in leaves]
                    if forward is not None:
                        module.forward = forward
                    outputs.append(_called(module, tree_unflatten(part, spec)))
                    at += size
        except (MemoryError, RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, RanksDisagreeError):
                raise
            if not is_out_of_memory(error):
                raise torch.OutOfMemoryError(
                    f"{type(module).__name__} runs out of memory with {samples} samples, and cannot be called for "
                    f"{sizes[0]} of them: {error}"
                ) from error
            let_go(error)
            return []
        return [_joined(outputs, sizes, exact=exact)]

    parts = 1
    while parts < samples:
        parts = -(-samples // -(-samples // (2 * parts)))  # of half the size, rounded up
        if found := computed(_even(samples, parts)):  # smaller parts would give nothing else
            if exact:
                _check_alike(computed([2]), computed([1, 1]))
            return found[0]
    raise torch.OutOfMemoryError(
        f"{type(module).__name__} runs out of memory with {count(samples, 'sample')}, and with fewer"
    )


def _called(module: torch.nn.Module, given: Any) -> Any:
    args, kwargs = given
    return module(*args, **kwargs)


def _even(samples: int, parts: int) -> list[int]:
    """Return the sizes of ``parts`` parts that differ by one at most, since BatchNorm needs two samples in each."""
    least, more = divmod(samples, parts)
    return [least + 1] * more + [least] * (parts - more)


def _joined(outputs: Sequence[Any], sizes: Sequence[int], *, exact: bool) -> Any:
    """Return the joined outputs of all parts."""
    try:
        return _mapped(lambda column: _join(column, sizes, exact=exact), outputs)
    except (RuntimeError, ValueError) as error:  # other shapes, as of samples padded to the longest of a part
        if is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(_DIFFERS) from error


def _mapped(function: Callable[[Sequence[Any]], Any], trees: Sequence[Any]) -> Any:
    """Return a tree like each of ``trees``, with ``function`` of their leaves in each place, also in dataclasses."""
    flat = [tree_flatten(each) for each in trees]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_mapped_leaf(function, column) for column in columns], flat[0][1])


def _mapped_leaf(function: Callable[[Sequence[Any]], Any], column: Sequence[Any]) -> Any:
    if not dataclasses.is_dataclass(column[0]) or isinstance(column[0], type):
        return function(column)
    made = copy.copy(column[0])
    for field in dataclasses.fields(made):
        value = _mapped(function, [getattr(each, field.name) for each in column])
        object.__setattr__(made, field.name, value)  # also of a frozen one
    return made


def _join(column: Sequence[Any], sizes: Sequence[int], *, exact: bool) -> Any:
    """Return the joined value of one leaf, from the outputs of all parts."""
    if all(_is_of(each, size) for each, size in zip(column, sizes, strict=True)):
        return torch.cat(list(column))
    if exact and column[0] is not None:
        raise torch.OutOfMemoryError(_DIFFERS)
    first = column[0]
    return torch.stack(list(column)).mean(0) if _is_real(first) and first.dim() == 0 else first


def _check_alike(together: Sequence[Any], apart: Sequence[Any]) -> None:
    """Raise OutOfMemoryError unless two samples have the same output at once and one by one, but for rounding."""
    if not together or not apart:
        raise torch.OutOfMemoryError(
            "the model runs out of memory with two samples at once, so that nothing shows whether its output for a "
            "part of a batch is the same: evaluate with batches of one sample"
        )
    different = list[bool]()
    try:
        _mapped(lambda column: different.append(not _is_close(*column)), [together[0], apart[0]])
    except ValueError:  # not as many leaves
        different.append(True)
    if any(different):
        raise torch.OutOfMemoryError(_DIFFERS)


def _is_close(value: Any, other: Any) -> bool:
    """True if the two outputs are equal but for rounding."""
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return value is None and other is None
    if value.shape != other.shape or not value.numel():
        return torch.equal(value, other)
    if not _is_real(value):  # of many labels a few change by rounding
        return float((value != other).float().mean()) <= _TOLERANCE
    largest = float(value.abs().nan_to_num(posinf=0.0).max())
    return torch.allclose(value, other, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)


def _is_of(value: Any, samples: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == samples


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


class _Lost(torch.autograd.Function):
    """Identity function on a tensor that gives other tensors zero gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *ends: Tensor) -> Tensor:
        """Return a copy of the tensor, which loops may change in place, unlike a view."""
        ctx.ends = ends
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return zeros that occupy no memory; those of a pass with ``create_graph=True`` have zero gradients again."""
        zeros = [each.new_zeros(()).expand(each.shape) for each in ctx.ends]
        return None, *([_through(each, ctx.ends) for each in zeros] if torch.is_grad_enabled() else zeros)


def _through(output: Tensor, ends: Sequence[Tensor]) -> Tensor:
    """Return ``output``, with zero gradients for ``ends``."""
    found: Tensor = _Lost.apply(output, *ends)  # type: ignore[no-untyped-call]
    return found


def give_zero_gradients(params: Sequence[Tensor]) -> None:
    """Give ``params`` zero gradients by running a backward pass over them."""
    with torch.enable_grad():
        torch.autograd.backward(_Lost.apply(params[0].new_zeros(()), *params))  # type: ignore[no-untyped-call]


class Untouched:
    """Check that a failed optimizer step has not changed any parameter, or any state from before the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
        self._optimizer, self._had = optimizer, set(optimizer.state)
        held = (each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor))
        self._versions = [(each, each._version) for each in (*params, *held)]

    def undo(self) -> bool:
        """Discard states that the failed step created; return False if it has changed a parameter or an older state."""
        if any(each._version != version for each, version in self._versions):
            return False
        for param in set(self._optimizer.state) - self._had:
            del self._optimizer.state[param]
        return True
