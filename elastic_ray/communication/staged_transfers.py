"""Sends and receives of CUDA tensors over gloo, through CPU memory (torch)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch


# gloo's collectives take CUDA tensors. Its sends and receives do not look where a tensor is, and would read its
# address as one of the CPU's.
class StagedTransfer:
    """Transfer in progress that goes through CPU memory, for ``Communicator.wait_all``.

    Args:
        host: CPU buffer that the transfer reads or writes, kept alive with this object.
        into: Tensor that receives the buffer's content; None for a send.
    """

    def __init__(self, work: Any, host: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._work, self._host, self._into = work, host, into

    def wait(self, timeout: timedelta) -> None:
        """Wait until the data has been sent, or received and copied to its target.

        Raises RuntimeError if the peer is gone, or ``timeout`` has passed.
        """
        self._work.wait(timeout)
        if self._into is not None:
            self._into.copy_(self._host)


def send_staged(send: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> StagedTransfer:
    """Start sending a tensor on any device; ``send`` starts sending its copy on the CPU and returns work."""
    host = tensor.detach().to("cpu", copy=True)
    return StagedTransfer(send(host), host)


def receive_staged(receive: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> StagedTransfer:
    """Start receiving into a tensor on any device; ``receive`` starts receiving into CPU memory and returns work."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    return StagedTransfer(receive(host), host, tensor)
