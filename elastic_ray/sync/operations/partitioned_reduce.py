"""Concurrent all-reduces of a bucket's parts (AutoDist: PartitionedAR and RandomAxisPartitionAR; torch)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.sync.device_numbers import real_shape
from elastic_ray.sync.operations.bucket_operation import BucketOperation, GradientBucket, WireForm

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import GradientGroup


class PartitionedReduceOperation(BucketOperation):
    """All-reduce of a bucket in several concurrent parts or in a smaller dtype; a stateless ``BucketOperation``.

    Along the first axis, the flat buffer is divided directly. Along another axis, each tensor is cut into slices, and
    the i-th slices of all tensors are packed together. If a tensor's axis is shorter than ``parts``, it is cut into as
    many slices as it allows.
    """

    def __init__(self, parts: int, axis: int, seed: int, places: Sequence[int], form: WireForm) -> None:
        self._parts, self._axis, self._seed, self._places = parts, axis, seed, tuple(places)
        self._form = form
        self._slices: list[torch.Tensor] = []  # of the bucket
        self._packed: list[torch.Tensor] = []  # their places in the pieces that travel
        self._pieces: list[torch.Tensor] = []
        self._cut_from: torch.Tensor | None = None

    def launch(self, bucket: GradientBucket, group: GradientGroup) -> Sequence[Any]:
        """Launch one all-reduce per part."""
        flat = bucket.flat_gradient()
        if self._axis == 0:
            pieces = torch.tensor_split(self._form.pack(flat), self._parts)
        else:
            self._cut(flat, [real_shape(p) for p in bucket.params])
            torch._foreach_copy_(self._packed, self._slices)
            pieces = tuple(self._pieces)
        return [group.all_reduce(piece) for piece in pieces if piece.numel()]

    def next_round(self, bucket: GradientBucket, group: GradientGroup, finished: int) -> Sequence[Any]:
        """Copy the sums back into the bucket."""
        if self._axis == 0:
            self._form.unpack(bucket.flat_gradient())
        else:
            torch._foreach_copy_(self._slices, self._packed)
        return ()

    def void(self) -> None:
        """Release the buffers; the operation keeps no other state."""
        self._form.drop()
        self._cut_from = None

    def _cut(self, flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
        """Cut the bucket into slices and allocate their packed buffers, if the bucket's buffer has changed."""
        if self._cut_from is flat:
            return
        tensors = torch.split(flat, [torch.Size(shape).numel() for shape in shapes])
        by_part: list[list[torch.Tensor]] = [[] for _ in range(self._parts)]
        for tensor, shape, place in zip(tensors, shapes, self._places, strict=True):
            axis = partition_axis(shape, self._axis, self._seed, place)
            pieces = torch.tensor_split(tensor.view(shape or 1), self._parts, axis)
            for part, piece in zip(by_part, pieces, strict=True):
                part.append(piece)
        dtype = self._form.of(flat.dtype)
        sizes = [sum(each.numel() for each in part) for part in by_part]
        self._pieces = [torch.empty(size, dtype=dtype, device=flat.device) for size in sizes]
        self._slices = [each for part in by_part for each in part]
        self._packed = [
            place.view(each.shape)
            for piece, part in zip(self._pieces, by_part, strict=True)
            for place, each in zip(torch.split(piece, [each.numel() for each in part]), part, strict=True)
        ]
        self._cut_from = flat


def partition_axis(shape: Sequence[int], axis: int, seed: int, place: int) -> int:
    """Return the axis along which to divide a tensor; 0 for a tensor without dimensions.

    Args:
        axis: Value of ``Reduce.axis``. For a tensor with fewer dimensions, the last one is used. With -1, one of the
            divisible axes is drawn from ``seed`` (AutoDist: RandomAxisPartitionAR).
        place: Position of the tensor in the model; makes the choice differ between tensors.
    """
    if axis >= 0:
        return max(0, min(axis, len(shape) - 1))
    divisible = [number for number, size in enumerate(shape) if size > 1]
    return random.Random(f"{seed}/{place}").choice(divisible) if divisible else 0


class OwnerOperation(BucketOperation):
    """Reduction to an owner, and broadcast of the result; it keeps no state that could be lost with the owner."""

    def __init__(self, owner: int, form: WireForm) -> None:
        self._owner, self._form = owner, form
        self._sent: torch.Tensor | None = None

    def launch(self, bucket: GradientBucket, group: GradientGroup) -> Sequence[Any]:
        """Launch the reduction of the bucket to its owner."""
        self._sent = self._form.pack(bucket.flat_gradient())
        return (group.reduce(self._sent, self._owner),)

    def next_round(self, bucket: GradientBucket, group: GradientGroup, finished: int) -> Sequence[Any]:
        """After the first round, launch the owner's broadcast of the sum; after the second, copy it into the bucket."""
        if finished == 1 and self._sent is not None:
            return (group.broadcast(self._sent, self._owner),)
        self._form.unpack(bucket.flat_gradient())
        self._sent = None
        return ()

    def void(self) -> None:
        """Release the buffer; the operation keeps no other state."""
        self._sent = None
        self._form.drop()
