"""All-reduce of a flat bucket in 16 bits, or in its own form without anything that rides on it (torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_ray.sync.operations.bucket_operation import GradientBucket, GradientCollectives
from elastic_ray.sync.operations.wire_form import WireForm


class CastReduceOperation:
    """See ``BucketOperation``, which this is. Weights count before the rounding; it keeps nothing.

    Args:
        form: of the gradients on their way.
    """

    def __init__(self, form: WireForm) -> None:
        self._form = form

    def launch(self, bucket: GradientBucket, group: GradientCollectives) -> Sequence[Any]:
        """The rounded gradients."""
        return (group.all_reduce(self._form.pack(bucket.flat_gradient())),)

    def go_on(self, bucket: GradientBucket, group: GradientCollectives, finished: int) -> Sequence[Any]:
        """The sum, back in the bucket's own form."""
        self._form.unpack(bucket.flat_gradient())
        return ()

    def commit(self) -> None:
        """Nothing is kept."""

    def void(self) -> None:
        """Nothing is kept but a buffer."""
        self._form.drop()
