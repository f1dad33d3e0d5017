"""Recovery of a wrapped model that runs out of memory: the step is lost, and its batch is drawn again (torch).

An exception that leaves the user's loop could only be handled by restarting the job. Errors are therefore caught at
their source: in the model's forward pass, in ``backward()`` and in ``optimizer.step()``. User code then gets outputs of
the right shape, zero gradients and an optimizer that does not step, and the loader draws the batch again in smaller
micro-batches. Errors in the user's own computations in between (a loss) are raised as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from elastic_ray.steps.out_of_memory import is_out_of_memory, let_go
from placement.text import count


def lost_output(module: torch.nn.Module, args: Any, kwargs: Any, params: Sequence[Tensor]) -> Any:
    """Return an output of ``module`` for a step abandoned for lack of memory; it gives ``params`` zero gradients.

    Raises:
        torch.OutOfMemoryError: Not even a single sample fits, or the arguments cannot be split.
    """
    output = in_parts(module, args, kwargs, exact=False)
    leaves, spec = tree_flatten(output)
    ends = list(params) or [torch.zeros((), requires_grad=True)]
    through: Callable[..., Tensor] = _Lost.apply
    return tree_unflatten([through(each, *ends) if _is_real(each) else each for each in leaves], spec)


def in_parts(
    module: torch.nn.Module, args: Any, kwargs: Any, *, exact: bool, agree: Callable[[int], None] | None = None
) -> Any:
    """Return the output of ``module`` without an autograd graph, computed in halves of the batch, quarters, and so on.

    Args:
        exact: If True, the output must equal the output for all samples at once, so scalar outputs such as a mean over
            samples are refused. If False, scalar outputs are averaged over the parts.
        agree: Called with the number of parts before ``module`` is called for them; a sharded model's ranks call it
            together.

    Raises:
        torch.OutOfMemoryError: Not even one sample fits, or arguments or output cannot be split.
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
        if agree is not None:
            agree(len(parts))
        try:
            with torch.no_grad():
                outputs = [_called(module, tree_unflatten(part, spec)) for part in parts]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            let_go(error)
        else:  # smaller parts would give nothing else
            return _joined(outputs, [min(size, samples - at) for at in range(0, samples, size)], exact=exact)
    raise torch.OutOfMemoryError(
        f"{type(module).__name__} runs out of memory with {count(samples, 'sample')}, and with fewer"
    )


def _called(module: torch.nn.Module, given: Any) -> Any:
    args, kwargs = given
    return module(*args, **kwargs)


def _joined(outputs: Sequence[Any], sizes: Sequence[int], *, exact: bool) -> Any:
    """Return the joined outputs of all parts."""
    flat = [tree_flatten(each) for each in outputs]
    return tree_unflatten(
        [_join(column, sizes, exact=exact) for column in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1]
    )


def _join(column: Sequence[Any], sizes: Sequence[int], *, exact: bool) -> Any:
    """Return the joined value of one leaf, from the outputs of all parts."""
    if all(_is_of(each, size) for each, size in zip(column, sizes, strict=True)):
        return torch.cat(list(column))
    if exact and column[0] is not None:
        raise torch.OutOfMemoryError(
            "the model runs out of memory, and its output for a part of a batch differs from that for the whole "
            "batch: evaluate with smaller batches"
        )
    first = column[0]
    return torch.stack(list(column)).mean(0) if _is_real(first) and first.dim() == 0 else first


def _is_of(value: Any, samples: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == samples


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


class _Lost(torch.autograd.Function):
    """Identity function on a tensor that gives some parameters zero gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *params: Tensor) -> Tensor:
        """Return the tensor unchanged."""
        ctx.save_for_backward(*params)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return zeros that occupy no memory."""
        return None, *(each.new_zeros(()).expand(each.shape) for each in ctx.saved_tensors)


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
