"""Estimate of the memory each worker needs for a model that is sharded over the workers (torch)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from elastic_ray.sync.sharded_parameters.row_layout import COPIES
from placement.checks import check_whole
from placement.cluster.sizes import MemoryNeed

# While rows move, a worker holds those that it had, those of the new group, and what has come of them by wire.
_WHILE_ROWS_MOVE = 3


def sharded_memory(
    model: nn.Module,
    *,
    available_bytes: int,
    other_bytes: int = 0,
    optimizer_states: int = 2,
    shard_size: int | None = None,
) -> MemoryNeed:
    """Return the memory that a worker needs to train a model under ``elastic_ray.fully_shard``.

    The result is for ``SchedulingConfig(memory=)``. Without ``shard_size``, it says that each of W workers needs

        buffers + other_bytes + 3 (P + optimizer_states T) min(2, W) / W  [bytes]

    with P the bytes in all parameters and T the bytes in trainable parameters. Two ranks hold each shard. The factor 3
    is the peak while rows move between workers. Gradients are empty at that moment, and fit into the same memory
    otherwise. Activations and gathered parameters are not counted; include them in ``other_bytes``.

    Args:
        model: The model before ``fully_shard``; on the meta device it uses no memory.
        available_bytes: Memory of one worker, such as ``80 << 30`` for a GPU.
        other_bytes: Further memory that each worker needs regardless of the number of workers.
        optimizer_states: Number of parameter-sized tensors that the optimizer keeps per parameter: 2 for Adam and
            AdamW, 1 for SGD with momentum.
        shard_size: Value passed to ``fully_shard``; None if it is omitted there.

    Raises:
        TypeError: The model is not a ``torch.nn.Module``, or a number is not an integer.
        ValueError: A number is outside its range, or the model does not fit with any number of workers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but got {type(model).__name__}")
    check_whole("other_bytes", other_bytes)
    check_whole("optimizer_states", optimizer_states)
    trained = _nbytes(p for p in model.parameters() if p.requires_grad)
    held = _nbytes(model.parameters()) + optimizer_states * trained
    return MemoryNeed(
        available_bytes=available_bytes,
        sharded_bytes=_WHILE_ROWS_MOVE * held,
        replicated_bytes=_nbytes(model.buffers()) + other_bytes,
        copies=COPIES,
        shard_size=shard_size,
    )


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
