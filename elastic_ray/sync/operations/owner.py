"""The traffic of a parameter server: gradients to the rank that owns them, their mean back to all (torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_ray.sync.operations.bucket_operation import GradientBucket, GradientCollectives
from elastic_ray.sync.operations.wire_form import WireForm


class OwnerOperation:
    """See ``BucketOperation``, which this is. It keeps nothing, so that an owner's loss loses nothing.

    Args:
        owner: the rank that collects the bucket.
        form: of the gradients on their way.
    """

    def __init__(self, owner: int, form: WireForm) -> None:
        self._owner = owner
        self._form = form
        self._sent: torch.Tensor | None = None

    def launch(self, bucket: GradientBucket, group: GradientCollectives) -> Sequence[Any]:
        """To the owner."""
        self._sent = self._form.pack(bucket.flat_gradient())
        return (group.reduce(self._sent, self._owner),)

    def go_on(self, bucket: GradientBucket, group: GradientCollectives, finished: int) -> Sequence[Any]:
        """Back to all."""
        if finished == 1 and self._sent is not None:
            return (group.broadcast(self._sent, self._owner),)
        self._form.unpack(bucket.flat_gradient())
        self._sent = None
        return ()

    def commit(self) -> None:
        """Nothing is kept."""

    def void(self) -> None:
        """Nothing is kept but a buffer."""
        self._sent = None
        self._form.drop()
