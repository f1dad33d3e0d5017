"""Base of the operations that owe a part of the gradients for some time, and the simplest of them (torch)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch

from elastic_ray.batch.device_numbers import real_count, shaped_like
from elastic_ray.sync.operations.bucket_operation import BucketOperation, GradientBucket, GradientCollectives
from elastic_ray.sync.operations.residual import Residual


class OwingOperation(abc.ABC):
    """A ``BucketOperation`` that adds what is owed to a pass's gradients."""

    def __init__(self) -> None:
        self.residual = Residual()
        self._plain, self._scale = False, 1.0

    def prepare(self, *, plain: bool, scale: float) -> None:
        """Prepare a pass.

        Args:
            plain: send its gradients as they are, for statistics; what is owed waits.
            scale: AMP's loss scale in them.
        """
        self._plain, self._scale = plain, scale

    @abc.abstractmethod
    def launch(self, bucket: GradientBucket, group: GradientCollectives) -> Sequence[Any]:
        """See ``BucketOperation``."""

    @abc.abstractmethod
    def go_on(self, bucket: GradientBucket, group: GradientCollectives, finished: int) -> Sequence[Any]:
        """See ``BucketOperation``."""

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

    def launch(self, bucket: GradientBucket, group: GradientCollectives) -> Sequence[Any]:
        if not self._plain:
            owed = self.residual.take(self._scale)
            if owed is not None:
                bucket.add_vector(owed)
            self.residual.leave(None, self._scale)
        return self._operation.launch(bucket, group)

    def go_on(self, bucket: GradientBucket, group: GradientCollectives, finished: int) -> Sequence[Any]:
        return self._operation.go_on(bucket, group, finished)

    def commit(self) -> None:
        super().commit()
        self._operation.commit()

    def void(self) -> None:
        super().void()
        self._operation.void()
