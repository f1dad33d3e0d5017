"""Reduction of gradients to their optimizer state's owners, in two exchanges (torch)."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elastic_ray.sync.operations.bucket_operation import BucketOperation, WireForm
from elastic_ray.sync.operations.buckets import Bucket
from elastic_ray.sync.preconditioners import FlatPreconditioner, squared_norm
from elastic_ray.sync.sliced_gradients.routes import BucketPiece, Routes, pieces_of, routes
from elastic_ray.sync.sliced_gradients.sliced_gradient import ADDS_UP, Content, SlicedGradient, plain_or_sliced

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import GradientGroup
    from elastic_ray.sync.optimizer_tiles.holder import Owners
    from elastic_ray.sync.optimizer_tiles.tiled_optimizer import TiledOptimizer

NUMBERS = 3
"""What ranks tell each other of each parameter: the squared norm of what a rank adds up, its NaNs, its infinities."""


class SlicedBucket(Bucket):
    """Bucket with sums that are sent only to the ranks owning their optimizer state.

    Before its reduction is launched, it is an ordinary bucket. From then on, ``.grad`` is a ``SlicedGradient``, and
    the bucket holds the sums of the parts that this rank owns.
    """

    sliced = True

    def __init__(
        self, index: int, group: int, params: Sequence[torch.nn.Parameter], tiles: Sequence[TiledOptimizer]
    ) -> None:
        super().__init__(index, group, params)
        self._tiles = tiles
        self._pieces: tuple[list[Owners], tuple[BucketPiece, ...]] | None = None
        self._contents: dict[int, Content] = {}  # of gradients that are being reduced, or were
        self._own: Tensor | None = None  # this rank's weighted gradients, as they were sent
        self._kept: list[tuple[BucketPiece, Tensor]] | None = None  # what this rank has added up; None before
        self._received: list[tuple[BucketPiece, Tensor]] = []
        self._numbers: list[list[float]] = []

    @property
    def pieces(self) -> tuple[BucketPiece, ...]:
        """Pieces of the bucket for the current owners, as a new tuple whenever the owners change."""
        owners = [each.owners for each in self._tiles]
        if self._pieces is None or any(map(operator.is_not, owners, self._pieces[0])):
            found = [each.owned_spans(self.params) for each in self._tiles if each.tiled]
            spans = [[span for mine in of_param for span in mine] for of_param in zip(*found, strict=True)]
            self._pieces = owners, pieces_of([p.numel() for p in self.params], spans)
        return self._pieces[1]

    def start_pass(self, *, first: bool, reduces: bool, accumulates: bool) -> float:
        """Start a backward pass; sliced gradients that were zeroed in place become ordinary tensors."""
        for param in self.params:
            if isinstance(param.grad, SlicedGradient):
                param.grad = plain_or_sliced(param.grad)
        return super().start_pass(first=first, reduces=reduces, accumulates=accumulates)

    def put(self, weight: float, *, sums: bool = False) -> Tensor | None:
        """Copy the weighted gradients into the bucket, like ``Bucket.put``.

        Raises RuntimeError if a gradient is sparse or was removed, or a sliced gradient was not zeroed.
        """
        if any(isinstance(param.grad, SlicedGradient) for param in self.params):
            raise RuntimeError(ADDS_UP)
        self._kept = None
        return super().put(weight, sums=sums)

    def give(self, own: Tensor) -> None:
        """Store ``own``, the gradients sent by this rank, and make each parameter's ``.grad`` sliced."""
        self._own = own
        self.grads = []
        self._contents = {}
        for index, (param, had) in enumerate(zip(self.params, self.has_gradient, strict=True)):
            if had:
                self._show(index, param)

    def _show(self, index: int, param: torch.nn.Parameter) -> None:
        content = self._contents[index] = Content()
        param.grad = SlicedGradient(param, content)

    def take(self, kept: Sequence[tuple[BucketPiece, Tensor]], received: Sequence[tuple[BucketPiece, Tensor]]) -> None:
        """Store the sums computed by this rank (``kept``), and the sums it ``received`` because it owns them too."""
        self._kept, self._received = list(kept), list(received)

    def numbers(self) -> Tensor:
        """Return the squared norm, NaN count and infinity count of this rank's sums, [parameters, 3] in float64."""
        found = torch.zeros(len(self.params), NUMBERS, dtype=torch.float64)
        kept = self._kept or []
        if not kept:
            return found
        norms = torch.stack(torch._foreach_norm([part for _, part in kept])).double().cpu()
        places = torch.tensor([piece.param for piece, _ in kept])
        found[:, 0].index_add_(0, places, norms.square())
        for (piece, part), norm in zip(kept, norms.tolist(), strict=True):
            if not norm < float("inf"):  # it may have overflown
                found[piece.param, 1] += float(part.isnan().sum())
                found[piece.param, 2] += float(part.isinf().sum())
        return found

    def know(self, numbers: Tensor) -> None:
        """Store ``numbers``, the :meth:`numbers` results summed over all ranks."""
        self._numbers = numbers.tolist()

    @property
    def finite(self) -> bool:
        """True if the complete mean is finite, according to the statistics shared by all ranks."""
        return not any(nans or infinities for _, nans, infinities in self._numbers)

    def write_back(self, used: Callable[[], Sequence[bool]]) -> None:
        """Set ``.grad`` to the sliced mean; ``used()`` returns, for each parameter, whether any rank had a gradient."""
        for index, (param, flag) in enumerate(zip(self.params, used(), strict=True)):
            if flag and index not in self._contents:
                self._show(index, param)
        for index, content in self._contents.items():
            content.know(*self._numbers[index])
        for piece, part in [*(self._kept or []), *self._received]:
            if piece.param in self._contents:
                self._contents[piece.param].parts[piece.start] = part
        self._contents = {}

    def squared_norm(self, preconditioner: FlatPreconditioner | None) -> Tensor:
        """Return the squared norm of the bucket or, after the reduction, of the part summed by this rank."""
        if self._kept is None:
            return super().squared_norm(preconditioner)
        found = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.params[0].device)
        for piece, part in self._kept:
            if preconditioner is not None:
                found += preconditioner.squared_norm(part, piece.at).to(found.dtype)
            else:
                found += squared_norm(part).to(found.dtype)
        return found

    def own_is_finite(self) -> bool:
        if self._own is None:
            return super().own_is_finite()
        tensors = [self._own, *([self.carried] if self.carried is not None else [])]
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def replace_buffer(self) -> None:
        """Drop all memory that an abandoned reduction may still be writing to; the bucket's gradients become zero."""
        super().replace_buffer()
        for index in self._contents:
            grad = self.params[index].grad
            if isinstance(grad, SlicedGradient):
                grad.clear()
        self._contents, self._own, self._kept, self._received = {}, None, None, []


@dataclasses.dataclass(slots=True)
class _Buffers:
    """Memory for one bucket's pieces, and a view of it for each piece."""

    sent: Tensor
    sent_views: list[Tensor]
    kept: Tensor
    kept_views: list[Tensor]
    passed: Tensor
    passed_views: list[Tensor]
    followed: Tensor
    followed_views: list[Tensor]


class SlicedOperation(BucketOperation):
    """Reduction of gradients to their optimizer state's owners; a stateless ``BucketOperation``.

    Each rank sends its gradients once, and receives the sums for the tiles it owns. With W ranks and two owners per
    tile, the two exchanges send (W - 1) / W and 1 / W of the bucket, compared with 2 (W - 1) / W for an all-reduce. All
    owners of a piece have bit-identical results: the first owner sums in rank order, and sends the sum to the others.
    """

    def __init__(self, copies: int, form: WireForm) -> None:
        self._copies, self._form = copies, form
        self._routes: Routes | None = None
        self._for: object = None
        self._buffers: _Buffers | None = None
        self._arrived: Tensor | None = None

    def launch(self, bucket: SlicedBucket, group: GradientGroup) -> Sequence[Any]:
        """Launch the exchange that sends all pieces to their first owners."""
        self._update_routes(bucket, group)
        made, buffers = self._known
        pieces = [bucket.body[piece.at : piece.at + piece.length] for piece in made.sent]
        torch._foreach_copy_(buffers.sent_views, pieces)
        world, share = group.world_size, buffers.kept.numel()
        # What was copied leaves room for what arrives.
        fits = buffers.sent.dtype == bucket.dtype and world * share <= bucket.body.numel()
        self._arrived = bucket.body[: world * share] if fits else buffers.sent.new_empty(world * share)
        bucket.give(buffers.sent)
        return (group.all_to_all(self._arrived, buffers.sent, [share] * world, made.sent_splits),)

    def next_round(self, bucket: SlicedBucket, group: GradientGroup, finished: int) -> Sequence[Any]:
        """Sum the pieces, and send the sums to the other owners; in the last call, pass all sums to the bucket."""
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

    def _update_routes(self, bucket: SlicedBucket, group: GradientGroup) -> None:
        """Adapt the routes and memory to the current owners."""
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

    def void(self) -> None:
        """Release the buffers; the operation keeps no other state."""
        self._buffers = self._arrived = None


def _memory(pieces: Sequence[BucketPiece], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a flat buffer for consecutive pieces, and a view for each piece."""
    sizes = [piece.length for piece in pieces]
    flat = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
    return flat, list(torch.split(flat, sizes)) if sizes else []
