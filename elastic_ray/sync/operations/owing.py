"""Operations that owe a part of the gradients for some time: residuals, and compression with error feedback (torch)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from elastic_ray.batch.device_numbers import real_count, shaped_like
from elastic_ray.sync.operations.bucket_operation import BucketOperation, GradientBucket

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import GradientGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Owed:
    """Residual of a gradient that is still to be sent."""

    flat: torch.Tensor | None  # it, as one vector; None for nothing
    scale: float  # AMP's loss scale that is in it


class Residual:
    """Residual of one bucket: what is owed, what the pass in progress leaves, and what ranks owe together.

    A pass adds what is owed to its gradients and then owes what it has left out itself. Several passes of one step
    follow each other. None of that counts before :meth:`commit`, and :meth:`void` goes back to the last one.

    Before a change of group :meth:`fold` is given the sum over all ranks, which is then kept beside this rank's own
    until a pass of the next group begins: a change that fails half-way can still continue from either.
    """

    def __init__(self) -> None:
        self._kept: Owed | None = None
        self._latest: Owed | None = None  # of an earlier pass of this step
        self._fresh: Owed | None = None  # of the last pass
        self._spare: torch.Tensor | None = None
        self.folded: torch.Tensor | None = None  # that sum, without a loss scale; None where there is none

    @property
    def owed(self) -> Owed | None:
        """Residual after the last committed step; None if nothing is owed."""
        return self._kept

    @property
    def in_use(self) -> bool:
        """True if a pass has a residual to add."""
        return self._kept is not None or self.folded is not None

    def add_to(self, flat: torch.Tensor, scale: float) -> None:
        """Add the residual to the vector of a pass that begins."""
        owed = self._begin_pass()
        if owed is not None and owed.flat is not None:
            flat.add_(owed.flat, alpha=scale / owed.scale)

    def take(self, scale: float) -> torch.Tensor | None:
        """Return the residual times ``scale`` for a pass whose gradients are no vector; None if nothing is owed."""
        owed = self._begin_pass()
        return None if owed is None or owed.flat is None else owed.flat * (scale / owed.scale)

    def _begin_pass(self) -> Owed | None:
        self.folded = None
        self._latest, self._fresh = self._fresh or self._latest, None
        return self._latest or self._kept

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for what a pass leaves out; its content is of no meaning."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and spare.shape == like.shape else torch.empty_like(like)

    def leave(self, flat: torch.Tensor | None, scale: float) -> None:
        """Leave the residual of the pass; None for nothing."""
        self._fresh = Owed(flat, scale)

    def drop(self) -> None:
        """Drop the pass."""
        self._fresh = None

    def commit(self) -> None:
        """Commit the step."""
        new = self._fresh or self._latest
        if new is not None:
            self._spare = self._kept.flat if self._kept is not None else None
            self._kept = new if new.flat is not None else None
        self._latest = self._fresh = None

    def void(self) -> None:
        """Discard the pass: the residual stays as it was before."""
        self._latest = self._fresh = None

    def fold(self, total: torch.Tensor) -> None:
        """Store the sum of all ranks' residuals, without a loss scale, before the ranks leave the group."""
        self.folded = total

    def share(self, ranks: int) -> None:
        """Share the known sum equally among the ranks of a new group."""
        total = self.folded
        if total is not None:
            self.become(total / ranks)
            self.folded = total

    def become(self, flat: torch.Tensor | None) -> None:
        """Replace the residual by `flat`, without a loss scale."""
        self._latest = self._fresh = self._spare = self.folded = None
        self._kept = None if flat is None else Owed(flat, 1.0)


class OwingOperation(abc.ABC):
    """Base of the operations that add a residual to a pass's gradients."""

    def __init__(self) -> None:
        self.residual = Residual()
        self._plain, self._scale = False, 1.0

    def prepare(self, *, plain: bool, scale: float) -> None:
        """Prepare a pass.

        Args:
            plain: send its gradients as they are, for statistics; what is owed waits.
        """
        self._plain, self._scale = plain, scale

    @abc.abstractmethod
    def launch(self, bucket: GradientBucket, group: GradientGroup) -> Sequence[Any]:
        """Launch the operation; see ``BucketOperation``."""

    @abc.abstractmethod
    def go_on(self, bucket: GradientBucket, group: GradientGroup, finished: int) -> Sequence[Any]:
        """Continue the operation; see ``BucketOperation``."""

    def settle(self, bucket: GradientBucket, scale: float) -> None:
        """Add the residual to the gradients of a group of one rank, which reduces nothing, if all of them are there.

        Args:
            scale: AMP's loss scale in their gradients.
        """
        owed = self.residual.owed
        if owed is None or owed.flat is None or any(p.grad is None for p in bucket.params):
            return
        vector = self.residual.take(scale)
        assert vector is not None, "it is owed"
        for param, piece in zip(
            bucket.params, torch.split(vector, [real_count(p) for p in bucket.params]), strict=True
        ):
            if param.grad is not None:
                piece = shaped_like(piece, param).to(param.grad.dtype)
                param.grad.add_(piece.to_sparse(1) if param.grad.is_sparse else piece)
        self.residual.leave(None, scale)

    def commit(self) -> None:
        """Commit the step."""
        self.residual.commit()

    def void(self) -> None:
        """Discard the pass: the residual stays as it was before."""
        self.residual.void()

    def drop(self) -> None:
        """Drop the last pass, whose sum was not finite."""
        self.residual.drop()


class SettlingOperation(OwingOperation):
    """Wrapper of an operation that adds once the residual left by the strategy before."""

    def __init__(self, operation: BucketOperation) -> None:
        super().__init__()
        self._operation = operation

    def launch(self, bucket: GradientBucket, group: GradientGroup) -> Sequence[Any]:
        if not self._plain:
            owed = self.residual.take(self._scale)
            if owed is not None:
                bucket.add_vector(owed)
            self.residual.leave(None, self._scale)
        return self._operation.launch(bucket, group)

    def go_on(self, bucket: GradientBucket, group: GradientGroup, finished: int) -> Sequence[Any]:
        return self._operation.go_on(bucket, group, finished)

    def commit(self) -> None:
        super().commit()
        self._operation.commit()

    def void(self) -> None:
        super().void()
        self._operation.void()


class Compression(Protocol):
    """Protocol of an approximate, compressed sum of vectors over all ranks."""

    def launch(self, params: Sequence[torch.Tensor], vector: torch.Tensor, group: GradientGroup) -> Sequence[Any]:
        """Start the first round; ``params`` have the shapes of what lies in the vector. Returns its works."""

    def go_on(
        self, vector: torch.Tensor, left_out: torch.Tensor | None, group: GradientGroup, finished: int
    ) -> Sequence[Any]:
        """Start the round after the first ``finished``.

        Returns its works; none once ``vector`` holds the sum, bit-identical on all ranks, and ``left_out`` what this
        rank has to send later, so that the sum over ranks of both is the exact one.
        """

    def commit(self) -> None:
        """Commit the step."""

    def void(self) -> None:
        """Discard the pass, whose collectives may have been abandoned."""

    def drop(self) -> None:
        """Drop the last pass."""

    def factors(self) -> dict[int, torch.Tensor]:
        """Return the factors that are equal on all ranks, by parameter of the bucket."""

    def take_factors(self, factors: dict[int, torch.Tensor]) -> None:
        """Continue from these."""


class CompressedOperation(OwingOperation):
    """Compressed all-reduce of one bucket; implements ``BucketOperation``.

    Args:
        places: the position of each of the bucket's parameters in the model.
        feeds_back: whether what it leaves out is kept for the next step.
    """

    def __init__(self, compression: Compression, places: Sequence[int], *, feeds_back: bool) -> None:
        super().__init__()
        self.compression = compression
        self.places = tuple(places)
        self._feeds_back = feeds_back
        self._vector: torch.Tensor | None = None
        self._left_out: torch.Tensor | None = None

    def launch(self, bucket: GradientBucket, group: GradientGroup) -> Sequence[Any]:
        vector = bucket.flat_gradient()
        if vector.dtype not in (torch.float32, torch.float64):
            vector = vector.float()
        self._vector = vector
        if self._plain:
            return (group.all_reduce(vector),)
        if self._feeds_back:
            self.residual.add_to(vector, self._scale)
            self._left_out = self.residual.room(vector)
        return self.compression.launch(bucket.params, vector, group)

    def go_on(self, bucket: GradientBucket, group: GradientGroup, finished: int) -> Sequence[Any]:
        vector = self._vector
        assert vector is not None, "no pass was launched"
        if not self._plain:
            works = self.compression.go_on(vector, self._left_out, group, finished)
            if works:
                return works
            if self._left_out is not None:
                self.residual.leave(self._left_out, self._scale)
        body = bucket.flat_gradient()
        if body is not vector:
            body.copy_(vector)
        self._vector = self._left_out = None
        return ()

    def commit(self) -> None:
        super().commit()
        self.compression.commit()

    def void(self) -> None:
        super().void()
        self.compression.void()
        self._vector = self._left_out = None

    def drop(self) -> None:
        super().drop()
        self.compression.drop()
