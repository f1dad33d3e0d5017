"""A wrapped model that runs out of memory: its step is lost, and the loop continues so that it is drawn again (torch).

An exception would leave the user's loop, which only a job can begin anew. So what fails here is caught where it is
raised: in the model's forward, in ``backward()`` and in ``optimizer.step()``. User code then has results of the right
shape, with gradients that are zero and an optimizer that does not step, and the loader draws the step again with
smaller micro-batches. What user code computes itself between these (a loss) raises, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from elastic_ray.steps.out_of_memory import is_out_of_memory, let_go


def lost_output(module: torch.nn.Module, args: Any, kwargs: Any, params: Sequence[Tensor]) -> Any:
    """Return an output for a lost step: that of ``module``, through which ``params`` get gradients of zero.

    Raises:
        torch.OutOfMemoryError: not even one sample at once fits, or the arguments cannot be cut.
    """
    output = in_parts(module, args, kwargs, exact=False)
    leaves, spec = tree_flatten(output)
    ends = list(params) or [torch.zeros((), requires_grad=True)]
    through: Callable[..., Tensor] = _Lost.apply
    return tree_unflatten([through(each, *ends) if _is_real(each) else each for each in leaves], spec)


def in_parts(module: torch.nn.Module, args: Any, kwargs: Any, *, exact: bool) -> Any:
    """Return the output of ``module`` without a graph, a part of the samples at a time: half of them, a quarter, ...

    Args:
        exact: the output must be that of all samples at once. Then numbers are refused, as a mean over samples, which
            else are the mean over the parts.

    Raises:
        torch.OutOfMemoryError: not even one sample fits, or arguments or output cannot be cut.
    """
    leaves, spec = tree_flatten((args, kwargs))
    samples = next((len(each) for each in leaves if isinstance(each, Tensor) and each.dim() > 0), 0)
    size = samples
    while size > 1:
        size = -(-size // 2)
        parts = [
            [each[at : at + size] if _is_of(each, samples) else each for each in leaves]
            for at in range(0, samples, size)
        ]
        try:
            with torch.no_grad():
                outputs = [_called(module, tree_unflatten(part, spec)) for part in parts]
            return _joined(outputs, [min(size, samples - at) for at in range(0, samples, size)], exact=exact)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            let_go(error)
    raise torch.OutOfMemoryError(f"{type(module).__name__} runs out of memory with {samples} samples, and with fewer")


def _called(module: torch.nn.Module, given: Any) -> Any:
    args, kwargs = given
    return module(*args, **kwargs)


def _joined(outputs: Sequence[Any], sizes: Sequence[int], *, exact: bool) -> Any:
    """Join the outputs of all parts into one."""
    flat = [tree_flatten(each) for each in outputs]
    return tree_unflatten(
        [_join(column, sizes, exact=exact) for column in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1]
    )


def _join(column: Sequence[Any], sizes: Sequence[int], *, exact: bool) -> Any:
    """Join what all parts have returned at one place of their outputs."""
    if all(_is_of(each, size) for each, size in zip(column, sizes, strict=True)):
        return torch.cat(list(column))
    if exact and column[0] is not None:
        raise torch.OutOfMemoryError(
            "the model runs out of memory, and its output for parts of a batch is not that of the whole one: evaluate "
            "with smaller batches"
        )
    first = column[0]
    return torch.stack(list(column)).mean(0) if _is_real(first) and first.dim() == 0 else first


def _is_of(value: Any, samples: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == samples


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


class _Lost(torch.autograd.Function):
    """Identity of a tensor through which some parameters get gradients of zero."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *params: Tensor) -> Tensor:
        """Return the tensor."""
        ctx.save_for_backward(*params)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return zeros, which take no memory of their own."""
        return None, *(each.new_zeros(()).expand(each.shape) for each in ctx.saved_tensors)


def give_zero_gradients(params: Sequence[Tensor]) -> None:
    """Run a backward pass over ``params`` that gives zero gradients."""
    with torch.enable_grad():
        torch.autograd.backward(_Lost.apply(params[0].new_zeros(()), *params))  # type: ignore[no-untyped-call]


class Untouched:
    """Check whether a failed optimizer has changed anything."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
        self._optimizer, self._had = optimizer, set(optimizer.state)
        held = (each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor))
        self._versions = [(each, each._version) for each in (*params, *held)]

    def undo(self) -> bool:
        """Discard states that it has begun to make; False if it has changed a parameter, or a state that there was."""
        if any(each._version != version for each, version in self._versions):
            return False
        for param in set(self._optimizer.state) - self._had:
            del self._optimizer.state[param]
        return True
