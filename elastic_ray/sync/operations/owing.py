"""Operations that send part of the gradients later: residuals, and compression with error feedback (torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from elastic_ray.sync.device_numbers import real_count, shaped_like
from elastic_ray.sync.operations.bucket_operation import BucketOperation, GradientBucket

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import GradientGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Owed:
    """Part of a gradient that has not been sent yet (its residual)."""

    flat: torch.Tensor | None  # it, as one vector; None for nothing
    scale: float  # AMP's loss scale that is in it


class Residual:
    """Residual of one bucket: the part of its gradients that has not been sent yet because of compression.

    Each pass adds the residual to its gradients and leaves a new residual, its own error. After a step's passes,
    :meth:`commit` makes their outcome final, and :meth:`void` restores the last committed residual.

    Before a group change, :meth:`fold` stores the sum over all ranks. It is kept along with this rank's residual until
    the first pass in the next group, so that a change that fails halfway can continue from either.
    """

    def __init__(self) -> None:
        self.owed: Owed | None = None
        self._latest: Owed | None = None  # of an earlier pass of this step
        self._fresh: Owed | None = None  # of the last pass
        self._spare: torch.Tensor | None = None
        self.folded: torch.Tensor | None = None  # that sum, without a loss scale; None where there is none

    @property
    def in_use(self) -> bool:
        """True if the next pass must add a residual (unsent part of the gradients)."""
        return self.owed is not None or self.folded is not None

    def add_to(self, flat: torch.Tensor, scale: float) -> None:
        """Add the residual (unsent gradients), multiplied by ``scale``, to ``flat``, a new pass's gradients."""
        owed = self._start_pass()
        if owed is not None and owed.flat is not None:
            flat.add_(owed.flat, alpha=scale / owed.scale)

    def take(self, scale: float) -> torch.Tensor | None:
        """Return the residual (unsent gradients) x ``scale``, for a pass without gradients; None if it has none."""
        owed = self._start_pass()
        return None if owed is None or owed.flat is None else owed.flat * (scale / owed.scale)

    def _start_pass(self) -> Owed | None:
        self.folded = None
        self._latest, self._fresh = self._fresh or self._latest, None
        return self._latest or self.owed

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory, shaped like ``like``, for a pass's residual."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and spare.shape == like.shape else torch.empty_like(like)

    def leave(self, flat: torch.Tensor | None, scale: float) -> None:
        """Set a pass's residual to ``flat`` (None for no residual), which includes AMP's loss scale ``scale``."""
        self._fresh = Owed(flat, scale)

    def drop(self) -> None:
        """Drop the last pass's residual (unsent gradients)."""
        self._fresh = None

    def commit(self) -> None:
        """Make the residual of the step's last pass final."""
        new = self._fresh or self._latest
        if new is not None:
            self._spare = self.owed.flat if self.owed is not None else None
            self.owed = new if new.flat is not None else None
        self._latest = self._fresh = None

    def void(self) -> None:
        """Discard the step's passes, and restore the residual (unsent gradients) to its state before the step."""
        self._latest = self._fresh = None

    def fold(self, total: torch.Tensor) -> None:
        """Store ``total``, the sum of all ranks' residuals without loss scale, before the ranks leave their group."""
        self.folded = total

    def share(self, ranks: int) -> None:
        """Set the residual to an equal share of the stored sum, in a new group of ``ranks`` ranks."""
        total = self.folded
        if total is not None:
            self.become(total / ranks)
            self.folded = total

    def become(self, flat: torch.Tensor | None) -> None:
        """Set the residual to ``flat``, which does not include a loss scale; None removes the residual."""
        self._latest = self._fresh = self._spare = self.folded = None
        self.owed = None if flat is None else Owed(flat, 1.0)


class OwingOperation(BucketOperation):
    """Base class for operations that send part of the gradients (the residual) only in a later pass."""

    def __init__(self) -> None:
        self.residual = Residual()
        self._plain, self._scale = False, 1.0

    def prepare(self, *, plain: bool, scale: float) -> None:
        """Prepare the operation for a pass.

        Args:
            plain: Whether to send the gradients uncompressed and without the residual, for statistics.
            scale: AMP's loss scale, which the gradients are multiplied by.
        """
        self._plain, self._scale = plain, scale

    def complete(self, bucket: GradientBucket, scale: float) -> None:
        """Add the residual to ``.grad`` if this rank's gradients are not reduced and all parameters have gradients.

        Args:
            scale: Factor for the residual: AMP's loss scale times the number of ranks.
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
        """Make the outcome of the step final, so that its residual is added to the next step's gradients."""
        self.residual.commit()

    def void(self) -> None:
        """Discard the step's passes, and restore the residual (unsent gradients) to its state before the step."""
        self.residual.void()

    def drop(self) -> None:
        """Drop the outcome of the last pass, because its sum was not finite."""
        self.residual.drop()


class SettlingOperation(OwingOperation):
    """Wrapper for an operation that also sends, once, the gradients left unsent by the previous strategy."""

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

    def next_round(self, bucket: GradientBucket, group: GradientGroup, finished: int) -> Sequence[Any]:
        return self._operation.next_round(bucket, group, finished)

    def commit(self) -> None:
        super().commit()
        self._operation.commit()

    def void(self) -> None:
        super().void()
        self._operation.void()


class Compression(Protocol):
    """Protocol for approximate sums of vectors over all ranks, which send less data than exact sums."""

    def launch(self, params: Sequence[torch.Tensor], vector: torch.Tensor, group: GradientGroup) -> Sequence[Any]:
        """Start the first round and return its work objects; ``params`` give the shapes of the parts of ``vector``."""

    def next_round(
        self, vector: torch.Tensor, left_out: torch.Tensor, group: GradientGroup, finished: int
    ) -> Sequence[Any]:
        """Start the next round after ``finished`` rounds and return its work objects; none once ``vector`` is the sum.

        The sum is bitwise identical on all ranks. ``left_out`` then holds this rank's residual; adding the residuals
        of all ranks to the sum gives the exact sum.
        """

    def commit(self) -> None:
        """Make the outcome of the step final; any low-rank factors become the next step's starting point."""
        return

    def void(self) -> None:
        """Discard the last pass, because its collectives may have been abandoned or its sum was not finite."""

    def factors(self) -> dict[int, torch.Tensor]:
        """Return the low-rank factors, the same on all ranks, keyed by the parameter's position in the bucket."""
        return {}

    def set_factors(self, factors: dict[int, torch.Tensor]) -> None:
        """Use the given low-rank factors as the next step's starting point."""
        return


class CompressedOperation(OwingOperation):
    """Compressed all-reduce of one bucket; implements ``BucketOperation``."""

    def __init__(self, compression: Compression, places: Sequence[int]) -> None:
        super().__init__()
        self.compression = compression
        self.places = tuple(places)
        self._vector: torch.Tensor | None = None
        self._left_out: torch.Tensor | None = None

    def launch(self, bucket: GradientBucket, group: GradientGroup) -> Sequence[Any]:
        vector = bucket.flat_gradient()
        if vector.dtype not in (torch.float32, torch.float64):
            vector = vector.float()
        self._vector, self._left_out = vector, None
        if self._plain:
            return (group.all_reduce(vector),)
        self.residual.add_to(vector, self._scale)
        self._left_out = self.residual.room(vector)
        return self.compression.launch(bucket.params, vector, group)

    def next_round(self, bucket: GradientBucket, group: GradientGroup, finished: int) -> Sequence[Any]:
        vector = self._vector
        assert vector is not None, "no pass was launched"
        if self._left_out is not None:
            works = self.compression.next_round(vector, self._left_out, group, finished)
            if works:
                return works
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
        self.compression.void()
