"""SHELL over torch.distributed: gloo's sends and receives of tensors that are on a GPU, by way of the CPU's memory.

gloo's collectives take CUDA tensors. Its sends and receives do not look where a tensor is, and would read its address
as one of the CPU's.
"""

from __future__ import annotations

from typing import Any

import torch


class StagedTransfer:
    """A transfer under way, for ``Communicator.wait_all``.

    Args:
        work: gloo's.
        host: what it reads or writes; kept until the transfer is forgotten.
        into: where that goes once it has come; None for what is sent.
    """

    def __init__(self, work: Any, host: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._work, self._host, self._into = work, host, into

    def wait(self) -> None:
        """Wait until what is sent has gone, or what comes is in its place.

        Raises:
            RuntimeError: the peer is gone, or the time is up.
        """
        self._work.wait()
        if self._into is not None:
            self._into.copy_(self._host)


def send_staged(backend: Any, tensor: torch.Tensor, destination: int, tag: int) -> StagedTransfer:
    """Start sending a tensor of any device."""
    host = tensor.detach().to("cpu", copy=True)
    return StagedTransfer(backend.send([host], destination, tag), host)


def receive_staged(backend: Any, tensor: torch.Tensor, source: int, tag: int) -> StagedTransfer:
    """Start receiving into a tensor of any device."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    return StagedTransfer(backend.recv([host], source, tag), host, tensor)
