"""Memory need of a worker for a model that is divided among workers, counted from the model itself (torch)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from elastic_ray.sync.sharded_parameters.row_layout import COPIES
from placement.checks import check_whole
from placement.cluster.memory_need import MemoryNeed

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
    """Bytes that a worker needs to train a model under ``elastic_ray.fully_shard``, for ``SchedulingConfig(memory=)``.

    Counted are parameters and the optimizer's states of those that are trained, three times, in two copies: so much is
    held for a moment when rows move to other workers. Gradients are empty then, and fewer bytes than that; buffers
    are counted whole. Activations and what is gathered to compute with are not counted: they are ``other_bytes``.

    Args:
        model: as the train function builds it, before ``fully_shard``; on the meta device it takes no memory.
        available_bytes: what a worker has, such as ``80 << 30`` of a GPU.
        other_bytes: what each worker needs whole, whatever their number.
        optimizer_states: tensors of a parameter's shape that the optimizer keeps of each: 2 for Adam and AdamW, 1 for
            SGD with momentum.
        shard_size: as given to ``fully_shard``.

    Raises:
        TypeError: the model is none.
        ValueError: a number is no whole one, or the model fits into no number of workers.
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
