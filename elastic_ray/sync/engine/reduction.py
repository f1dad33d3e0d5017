"""The collectives of one backward pass: each bucket's operation, in rounds, and the tail's (torch)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from elastic_ray.sync.engine.context import SyncConsensus, SyncGroup
from elastic_ray.sync.engine.layout import BucketLayout
from elastic_ray.sync.operations.buckets import are_finite
from elastic_ray.sync.operations.compressed import CompressedOperation
from elastic_ray.sync.operations.owing import OwingOperation
from elastic_ray.sync.operations.protocol import GradientCollectives

PROBE_EVERY = 32
"""Steps of which one is sent uncompressed, for statistics of gradients."""


class Reduction:
    """See the module's text. All methods raise CommunicationFailedError where the group breaks.

    What operations keep from step to step counts once the optimizer has applied what they gave, or the step is over
    and its gradients wait for a later one. A step that is drawn again after the optimizer has applied it changes
    nothing any more, and neither does a pass whose sum is not finite.

    Args:
        group: the present group.
        consensus: waits.
        layout: of the buckets.
        grad_scale: AMP's present loss scale, 1 without AMP.
    """

    def __init__(
        self, group: SyncGroup, consensus: SyncConsensus, layout: BucketLayout, grad_scale: Callable[[], float]
    ) -> None:
        self._group = group
        self._consensus = consensus
        self._layout = layout
        self._grad_scale = grad_scale
        self._works: list[Any] = []
        self._owing = [each for each in layout.operations if isinstance(each, OwingOperation)]
        self._compresses = any(isinstance(each, CompressedOperation) for each in self._owing)
        self._plain = False
        self._asked = False  # the optimizer was, after the last pass
        self._finite: bool | None = None  # what that pass gave; None until it was looked at
        self._began_s = [0.0] * len(layout.buckets)
        self._took_s = list(self._began_s)

    @property
    def _gradients(self) -> GradientCollectives:
        return self._group.communicator.gradients

    def begin_step(self, steps: int) -> bool:
        """A step begins.

        Args:
            steps: committed ones, the same number on all ranks.

        Returns:
            Whether its gradients travel in a form that gives statistics.
        """
        self.end_step()
        self._plain = steps % PROBE_EVERY == 0
        return self._plain or not self._compresses or self._group.world_size == 1

    @property
    def spacing(self) -> int:
        """One in so many steps gives statistics."""
        return PROBE_EVERY if self._compresses and self._group.world_size > 1 else 1

    def launch(self, index: int) -> None:
        """Start the first round of a bucket that is full; of the last one with the tail."""
        layout = self._layout
        self._began_s[index] = time.perf_counter()
        if index == 0:
            self._asked, self._finite = False, None
            for owing in self._owing:
                owing.prepare(plain=self._plain and self._compresses, scale=self._grad_scale())
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
        if self._owing and not self.is_finite():
            for owing in self._owing:
                owing.drop()
        self._layout.sequel.reduced(self._took_s)

    def note_finite(self) -> None:
        """The last pass's sums were looked at by other means: they are finite."""
        self._finite = True

    def is_finite(self) -> bool:
        """Whether the last pass has given finite gradients; the same on all ranks."""
        if self._finite is None:
            self._finite = are_finite(self._layout.buckets)
        return self._finite

    def settle(self) -> None:
        """A group of one rank reduces nothing: what compressions owe goes into its gradients."""
        if self._owing and self._group.world_size == 1:
            for bucket, operation in zip(self._layout.buckets, self._layout.operations, strict=True):
                if isinstance(operation, OwingOperation):
                    operation.settle(bucket, self._grad_scale())

    def _started(self, index: int, works: Sequence[Any]) -> bool:
        """Whether a bucket's operation goes on."""
        self._works += works
        if not works:
            self._took_s[index] = time.perf_counter() - self._began_s[index]
        return len(works) > 0

    def asked(self) -> None:
        """The optimizer was asked to step."""
        self._asked = True

    def applied(self) -> None:
        """It steps: what the last pass has left in operations counts, whatever becomes of the step."""
        self._asked = False
        for operation in self._layout.operations:
            operation.commit()

    def end_step(self) -> None:
        """The step before is over."""
        if self._asked:  # and has not stepped: it had, before the step was drawn again
            self.void()
        else:
            self.applied()

    def void(self) -> None:
        """What the last passes have left in operations does not count."""
        self._asked = False
        self._works = []
        for operation in self._layout.operations:
            operation.void()
