"""Compressed all-reduce with error feedback: the residual is added to the next step (torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from elastic_ray.sync.operations.bucket_operation import GradientBucket, GradientCollectives
from elastic_ray.sync.operations.owing import OwingOperation


class Compression(Protocol):
    """A form in which vectors of all ranks are added up, about."""

    def launch(self, params: Sequence[torch.Tensor], vector: torch.Tensor, group: GradientCollectives) -> Sequence[Any]:
        """Start the first round; ``params`` have the shapes of what lies in the vector. Returns its works."""

    def go_on(
        self, vector: torch.Tensor, left_out: torch.Tensor | None, group: GradientCollectives, finished: int
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
    """See ``BucketOperation``, which this is.

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

    def launch(self, bucket: GradientBucket, group: GradientCollectives) -> Sequence[Any]:
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

    def go_on(self, bucket: GradientBucket, group: GradientCollectives, finished: int) -> Sequence[Any]:
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
