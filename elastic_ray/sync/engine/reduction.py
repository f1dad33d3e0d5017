"""The collectives of one backward pass: each bucket's operation, in rounds, and the tail's (torch)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from elastic_ray.sync.engine.context import SyncConsensus, SyncGroup
from elastic_ray.sync.engine.layout import BucketLayout
from elastic_ray.sync.operations.protocol import GradientCollectives


class Reduction:
    """See the module's text. All methods raise CommunicationFailedError where the group breaks.

    Args:
        group: the present group.
        consensus: waits.
        layout: of the buckets.
    """

    def __init__(self, group: SyncGroup, consensus: SyncConsensus, layout: BucketLayout) -> None:
        self._group = group
        self._consensus = consensus
        self._layout = layout
        self._works: list[Any] = []
        self._began_s = [0.0] * len(layout.buckets)
        self._took_s = list(self._began_s)

    @property
    def _gradients(self) -> GradientCollectives:
        return self._group.communicator.gradients

    def launch(self, index: int) -> None:
        """Start the first round of a bucket that is full; of the last one with the tail."""
        layout = self._layout
        self._began_s[index] = time.perf_counter()
        self._works += layout.operations[index].launch(layout.buckets[index], self._gradients)
        if index == len(layout.buckets) - 1 and not layout.tail_rides:
            self._works.append(self._gradients.all_reduce(layout.tail))

    def wait(self) -> None:
        """Wait for all that was started."""
        works, self._works = self._works, []
        for work in works:
            self._consensus.wait(work)

    def finish(self) -> None:
        """Go on in rounds until every bucket holds the sum; as many rounds on every rank."""
        self._took_s = [0.0] * len(self._began_s)
        finished = 1
        going = list(zip(self._layout.buckets, self._layout.operations, strict=True))
        while going := [
            (bucket, operation)
            for bucket, operation in going
            if self._started(bucket.index, operation.go_on(bucket, self._gradients, finished))
        ]:
            self.wait()
            finished += 1
        self._layout.sequel.reduced(self._took_s)

    def _started(self, index: int, works: Sequence[Any]) -> bool:
        """Whether a bucket's operation goes on."""
        self._works += works
        if not works:
            self._took_s[index] = time.perf_counter() - self._began_s[index]
        return len(works) > 0

    def commit(self) -> None:
        """What the last pass has left in operations counts."""
        for operation in self._layout.operations:
            operation.commit()

    def void(self) -> None:
        """It does not."""
        self._works = []
        for operation in self._layout.operations:
            operation.void()
