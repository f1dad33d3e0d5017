"""All-reduce of a flat bucket as it is, with what rides on it (torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_ray.sync.operations.bucket_operation import GradientCollectives
from elastic_ray.sync.operations.buckets import Bucket


class AllReduceOperation:
    """See ``BucketOperation``, which this is. It keeps nothing."""

    def launch(self, bucket: Bucket, group: GradientCollectives) -> Sequence[Any]:
        """The whole buffer with its tail."""
        return (group.all_reduce(bucket.flat),)

    def go_on(self, bucket: Bucket, group: GradientCollectives, finished: int) -> Sequence[Any]:
        """The sum is there."""
        return ()

    def commit(self) -> None:
        """Nothing is kept."""

    def void(self) -> None:
        """Nothing is kept."""
