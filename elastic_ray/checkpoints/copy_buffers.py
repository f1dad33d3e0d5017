"""Memory for copies of tensors that change while they are written (torch)."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Iterable, Sequence

import torch

Kind = tuple[torch.Size, torch.dtype, bool]
"""Shape and type of a tensor, and whether it is on a GPU."""


class CopyBuffers:
    """Preallocated buffers for copies of tensors.

    Writing to fresh memory is several times slower, so it is made, and touched, before.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self.made = 0

    def fit(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """A buffer for each tensor, None if one is missing. Some stay free: gradients are there at some steps only."""
        free = collections.defaultdict(list)
        for buffer in reversed(self._buffers):
            free[buffer.shape, buffer.dtype].append(buffer)
        found = [free[t.shape, t.dtype].pop() for t in tensors if free[t.shape, t.dtype]]
        return found if len(found) == len(tensors) else None

    def make(self, kinds: Sequence[Kind]) -> None:
        """Have buffers for tensors of these kinds, and no others. Raises MemoryError: there is no memory for them."""
        self.made += 1
        self._buffers = []  # old and new buffers must not take memory at the same time
        why = ""
        for pin in (True, False):  # pinned memory is scarce; without it a copy from a GPU takes longer
            try:
                self._buffers = [
                    torch.zeros(shape, dtype=dtype, pin_memory=pin and cuda) for shape, dtype, cuda in kinds
                ]
                return
            except Exception as error:
                why = str(error)
        raise MemoryError(f"there is no memory for a copy of the state: {why}")


def kinds_of(tensors: Iterable[torch.Tensor]) -> list[Kind]:
    """Return the kinds of the tensors: shape, dtype, and whether they are on a GPU."""
    return [(tensor.shape, tensor.dtype, tensor.is_cuda) for tensor in tensors]


def copy_into(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors, and wait until they are."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    for device in devices:  # the copies run on other streams than what computes the tensors
        torch.cuda.synchronize(device)
    pairs = sorted(zip(buffers, tensors, strict=True), key=lambda pair: -pair[0].nbytes)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # one thread does not fill the memory's bandwidth
        other = pool.submit(_copy_all, pairs[1::2])
        _copy_all(pairs[::2])
        other.result()
    for device in devices:
        torch.cuda.synchronize(device)


def _copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, tensor in pairs:
        buffer.copy_(tensor, non_blocking=True)
