"""Gradients to the owners of their optimizer state: an exchange and a sum, then the sum to other owners (torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elastic_ray.sync.operations.bucket_operation import WireForm
from elastic_ray.sync.sliced_gradients.routes import BucketPiece, Routes, routes
from elastic_ray.sync.sliced_gradients.sliced_bucket import SlicedBucket

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import GradientGroup


@dataclasses.dataclass(slots=True)
class _Buffers:
    """Memory for one bucket's pieces, and the views into it that are copied."""

    sent: Tensor
    sent_views: list[Tensor]
    kept: Tensor
    kept_views: list[Tensor]
    passed: Tensor
    passed_views: list[Tensor]
    followed: Tensor
    followed_views: list[Tensor]


class SlicedOperation:
    """Reduction of gradients to the owners of their optimizer state; a stateless ``BucketOperation``.

    A rank hands in its gradients once, and gets of them a share for each tile that it owns: (W - 1) / W and 1 / W of
    the bucket where tiles have two owners, and W ranks, against 2 (W - 1) / W of an all-reduce. Both owners of a piece
    have the same bits: the first one adds up, in rank order, and sends the sum to the others.

    Args:
        form: of the gradients on their way to the first owner.
    """

    def __init__(self, copies: int, form: WireForm) -> None:
        self._copies, self._form = copies, form
        self._routes: Routes | None = None
        self._for: object = None
        self._buffers: _Buffers | None = None
        self._arrived: Tensor | None = None

    def launch(self, bucket: SlicedBucket, group: GradientGroup) -> Sequence[Any]:
        """Launch the exchange that sends all pieces to their first owners."""
        self._follow(bucket, group)
        made, buffers = self._known
        pieces = [bucket.body[piece.at : piece.at + piece.length] for piece in made.sent]
        torch._foreach_copy_(buffers.sent_views, pieces)
        world, share = group.world_size, buffers.kept.numel()
        # What was copied leaves room for what arrives.
        fits = buffers.sent.dtype == bucket.dtype and world * share <= bucket.body.numel()
        self._arrived = bucket.body[: world * share] if fits else buffers.sent.new_empty(world * share)
        bucket.give(buffers.sent)
        return (group.all_to_all(self._arrived, buffers.sent, [share] * world, made.sent_splits),)

    def go_on(self, bucket: SlicedBucket, group: GradientGroup, finished: int) -> Sequence[Any]:
        """Launch the sums to the other owners; then they are all there."""
        made, buffers = self._known
        if finished == 1:
            assert self._arrived is not None, "it was launched"
            arrived = self._arrived.view(group.world_size, -1)
            torch.sum(arrived, 0, dtype=buffers.kept.dtype, out=buffers.kept)
            self._arrived = None
            if self._copies > 1:
                if buffers.passed_views:
                    torch._foreach_copy_(buffers.passed_views, [buffers.kept_views[i] for i in made.passed])
                return (group.all_to_all(buffers.followed, buffers.passed, made.followed_splits, made.passed_splits),)
        kept = zip(made.kept, buffers.kept_views, strict=True)
        bucket.take(list(kept), list(zip(made.followed, buffers.followed_views, strict=True)))
        return ()

    @property
    def _known(self) -> tuple[Routes, _Buffers]:
        assert self._routes is not None and self._buffers is not None, "it was launched"
        return self._routes, self._buffers

    def _follow(self, bucket: SlicedBucket, group: GradientGroup) -> None:
        """Adapt to the present owners with routes and memory."""
        pieces = bucket.pieces
        if self._for is not pieces:
            self._for, self._routes, self._buffers = pieces, routes(pieces, group.rank, group.world_size), None
        if self._buffers is None and self._routes is not None:
            made, flat, dtype = self._routes, bucket.body, self._form.of(bucket.dtype)
            sent, sent_views = _memory(made.sent, flat.new_empty(0, dtype=dtype))
            kept, kept_views = _memory(made.kept, flat)
            followed, followed_views = _memory(made.followed, flat)
            passed, passed_views = kept, list[Tensor]()
            if not made.passes_all:
                passed, passed_views = _memory([made.kept[i] for i in made.passed], flat)
            self._buffers = _Buffers(sent, sent_views, kept, kept_views, passed, passed_views, followed, followed_views)

    def commit(self) -> None:
        """Do nothing: the operation keeps no state."""

    def void(self) -> None:
        """Release the buffers; the operation keeps no other state."""
        self._buffers = self._arrived = None


def _memory(pieces: Sequence[BucketPiece], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a buffer for pieces, one after the other, and where each lies in it."""
    sizes = [piece.length for piece in pieces]
    flat = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
    return flat, list(torch.split(flat, sizes)) if sizes else []
