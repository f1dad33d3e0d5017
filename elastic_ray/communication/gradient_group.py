"""SHELL over torch.distributed: the collectives of the gradient group, which nothing but synchronisation uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic_ray.monitoring.traffic import Traffic


class GradientGroup:
    """Starts collectives among gradients; the works are for ``Communicator.wait``. Of one rank, it starts none.

    Args:
        rank: of this process.
        world_size: number of ranks.
        gloo: backend for CPU tensors.
        nccl: backend for CUDA tensors; None where gloo carries them, too.
        guard: carries an operation out unless the generation was called off, and turns errors into
            ``CommunicationFailedError``.
        traffic: counts what is handed to them.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        gloo: Callable[[], Any],
        nccl: Callable[[], Any],
        guard: Callable[[Callable[[], Any]], Any],
        traffic: Traffic,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._gloo = gloo
        self._nccl = nccl
        self._guard = guard
        self._traffic = traffic

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """The sum over all ranks, in place."""
        self._traffic.add("all_reduce", tensor.nbytes)
        backend = self._of(tensor)
        return self._guard(lambda: backend.allreduce([tensor]))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Every rank's ``tensor`` (of one size) into ``output``, one after the other in rank order."""
        self._traffic.add("all_gather", tensor.nbytes)
        backend = self._of(tensor)
        return self._guard(lambda: backend._allgather_base(output, tensor))

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
    ) -> Any:
        """Piece ``i`` of ``tensor`` to rank ``i``; what comes lies in ``output`` in rank order.

        Without splits all pieces are equal; splits count along the first dimension. Unlike sends and receives, it can
        be polled and called off, so ranks that have nothing for each other take part with splits of 0.
        """
        self._traffic.add("all_to_all", tensor.nbytes)
        backend = self._of(tensor)
        options = dist.AllToAllOptions()
        return self._guard(
            lambda: backend.alltoall_base(output, tensor, list(output_splits), list(input_splits), options)
        )

    def reduce(self, tensor: torch.Tensor, root: int) -> Any:
        """The sum over all ranks, in place on ``root``; elsewhere the tensor may be overwritten."""
        self._traffic.add("reduce", tensor.nbytes)
        backend = self._of(tensor)
        options = dist.ReduceOptions()
        options.rootRank = root
        return self._guard(lambda: backend.reduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Rank ``root``'s tensor, in place."""
        self._traffic.add("broadcast", tensor.nbytes if self.rank == root else 0)
        backend = self._of(tensor)
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._guard(lambda: backend.broadcast([tensor], options))

    def _of(self, tensor: torch.Tensor) -> Any:
        nccl = self._nccl() if tensor.is_cuda else None
        return self._gloo() if nccl is None else nccl
