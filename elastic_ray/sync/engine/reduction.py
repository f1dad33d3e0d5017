"""The collectives of one backward pass: each bucket's operation, in rounds, and the tail's (torch)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.batch.device_numbers import read
from elastic_ray.sync.engine.layout import BucketLayout
from elastic_ray.sync.operations.bucket_operation import GradientBucket
from elastic_ray.sync.operations.buckets import AllReduceOperation, Bucket
from elastic_ray.sync.operations.compressed import CompressedOperation
from elastic_ray.sync.operations.owing import OwingOperation

if TYPE_CHECKING:
    from elastic_ray.consensus.consensus import RankConsensus
    from elastic_ray.sync.engine.summing_group import SummingGroup

PROBE_EVERY = 32
"""Steps of which one is sent uncompressed, for statistics of gradients."""


class Reduction:
    """Runs the collectives of one backward pass.

    All methods raise CommunicationFailedError if the group breaks. All methods raise CommunicationFailedError where the
    group breaks.

    What operations keep from step to step counts once the optimizer has applied what they gave, or the step is over
    and its gradients wait for a later one. A step that is drawn again after the optimizer has applied it changes
    nothing any more, and neither does a pass whose sum is not finite.

    Args:
        group: ranks whose gradients are added up.
        consensus: waits.
        grad_scale: AMP's present loss scale, 1 without AMP.
    """

    def __init__(
        self, group: SummingGroup, consensus: RankConsensus, layout: BucketLayout, grad_scale: Callable[[], float]
    ) -> None:
        self._group, self._consensus, self._layout, self._grad_scale = group, consensus, layout, grad_scale
        self._works: list[list[Any]] = [[] for _ in layout.buckets]
        # operations that compress, or have something to send from a strategy before
        self.owing: Sequence[OwingOperation] = ()
        self._compresses = any(isinstance(each, CompressedOperation) for each in layout.operations)
        self._plain = False
        self._asked = False  # the optimizer was, after the last pass
        self._finite: bool | None = None  # what that pass gave; None until it was looked at
        self.written: set[int] = set()  # positions of buckets whose sums are in ``.grad`` already
        # sums over the elements of what the last pass gave, by which :meth:`take_totals` knows whether it is finite;
        # none where that is known
        self.totals: list[torch.Tensor] = []
        self._began_s = [0.0] * len(layout.buckets)
        self._took_s = list(self._began_s)

    def begin_step(self, steps: int) -> bool:
        """Start a step.

        Args:
            steps: committed ones, the same number on all ranks.

        Returns whether its gradients travel in a form that gives statistics.
        """
        self.end_step()
        self.written = set()  # also where nothing is reduced any more: this rank may have become the only one
        # What does not compress may have been given something to send by a change of group.
        self.owing = owing = list[OwingOperation]()
        for each in self._layout.operations:
            if isinstance(each, OwingOperation) and (isinstance(each, CompressedOperation) or each.residual.in_use):
                owing.append(each)
        self._plain = steps % PROBE_EVERY == 0
        return self._plain or not self._compresses or self._group.world_size == 1

    @property
    def spacing(self) -> int:
        """Interval in steps between gradient statistics."""
        return PROBE_EVERY if self._compresses and self._group.world_size > 1 else 1

    def launch(self, index: int) -> None:
        """Start the first round of a bucket that is full; of the last one with the tail."""
        layout, gradients = self._layout, self._group.group.communicator.gradients
        self._began_s[index] = time.perf_counter()
        if index == 0:
            self._asked, self._finite, self.written = False, None, set()
            for owing in self.owing:
                owing.prepare(plain=self._plain and self._compresses, scale=self._grad_scale())
        operation, bucket = layout.operations[index], layout.buckets[index]
        if type(operation) is AllReduceOperation and type(bucket) is Bucket:
            self._works[index].append(gradients.all_reduce(bucket.memory.flat))
        else:
            self._works[index] += operation.launch(bucket, gradients)
        if index == len(layout.buckets) - 1 and not layout.tail_rides:
            self._works[index].append(gradients.all_reduce(layout.tail))

    def finish(self, *, checks: bool) -> None:
        """Wait, and continue in rounds until every bucket holds the sum; as many rounds on every rank.

        What one bucket takes on the CPU is done while later ones are on their way: its finite sum goes into ``.grad``.

        Args:
            checks: whether :meth:`is_finite` is asked in every pass. Of buckets that are summed up before they are
                reduced the sum of all ranks' sums tells it.
        """
        communicator, operations = self._group.group.communicator, self._layout.operations
        looks, self.totals = checks or bool(self.owing), []
        self._took_s = [0.0] * len(self._began_s)
        told, finished, going, last = False, 0, self._layout.buckets, len(operations) - 1
        while going:
            finished, left = finished + 1, list[GradientBucket]()
            for bucket in going:
                index = bucket.index
                told = told or (bucket.is_summed_up and not self.owing)
                works, self._works[index] = self._works[index], []
                for work in works:
                    if not communicator.waited_briefly(work):
                        self._consensus.announcer.wait(work)
                if type(operations[index]) is not AllReduceOperation:  # whose first round is its last
                    self._works[index] = list(operations[index].go_on(bucket, communicator.gradients, finished))
                    if self._works[index]:
                        left.append(bucket)
                        continue
                self._took_s[index] = time.perf_counter() - self._began_s[index]
                if bucket.sliced:
                    continue
                if looks and (self.owing or not bucket.is_summed_up):
                    total = bucket.total()
                    if total.is_cuda:  # to look at it is to wait for the GPU
                        self.totals.append(total)
                        continue
                    if not (math.isfinite(total) or bucket.is_finite()):
                        self._finite = False
                        continue
                if bucket.complete and index < last:
                    bucket.write_back(lambda: ())
                    self.written.add(index)
            going = left
        if self._layout.sliced and not self._tell_sizes() and looks:
            self._finite = False
        if looks and self._finite is None and not self.totals and not told:
            self._finite = True
        if self.owing and not self.is_finite():
            for owing in self.owing:
                owing.drop()
        self._layout.sequel.reduced(self._took_s)

    def _tell_sizes(self) -> bool:
        """Exchange what all ranks must know of gradients that none of them holds; whether all are finite."""
        mine = [bucket.numbers() for bucket in self._layout.sliced]
        told = torch.cat(mine)
        self._consensus.wait(self._group.group.communicator.gradients.all_reduce(told))
        for bucket, numbers in zip(self._layout.sliced, torch.split(told, [len(each) for each in mine]), strict=True):
            bucket.know(numbers)
        return all(bucket.finite for bucket in self._layout.sliced)

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Function that sums numbers of all ranks, where each knows its part of some gradients; all ranks call it."""
        told = torch.tensor(list(values), dtype=torch.float64)
        self._consensus.wait(self._group.group.communicator.gradients.all_reduce(told))
        found: list[float] = told.tolist()
        return found

    def is_finite(self) -> bool:
        """True if the last pass gave finite gradients; the same on all ranks."""
        if self._finite is None:
            self.take_totals(read(self.totals or [bucket.total() for bucket in self._layout.buckets]))
        return self._finite is True

    def take_totals(self, values: Sequence[float]) -> None:
        """Evaluate the values of :attr:`totals`: the pass is finite if their sum is, or else all buckets are."""
        if values and self._finite is None:
            # A sum may overflow where no gradient has.
            self._finite = math.isfinite(sum(values)) or all(bucket.is_finite() for bucket in self._layout.buckets)

    def nonfinite_ranks(self) -> list[int] | None:
        """Return ranks whose own gradients in the last pass are not finite; None where its sum is."""
        if self._finite or self.is_finite():
            return None
        own = [int(not all(bucket.own_is_finite() for bucket in self._layout.buckets))]
        rows = self._group.group.communicator.gather_ints(own, with_gradients=True)
        return [rank for rank, (bad,) in enumerate(rows) if bad]

    def settle(self) -> None:
        """Prepare residuals in a group of one rank, which reduces nothing: they go into its gradients.

        Where ranks step by themselves, and their models are averaged, a rank's gradient counts for as little of the
        mean as there are ranks: what it owes does so, too.
        """
        if self._group.world_size == 1:
            scale = self._grad_scale() * len(self._group.group.nodes)
            for bucket, operation in zip(self._layout.buckets, self._layout.operations, strict=True):
                if isinstance(operation, OwingOperation):
                    operation.settle(bucket, scale)

    def asked(self) -> None:
        """Record that the optimizer was asked to step."""
        self._asked = True

    def applied(self) -> None:
        """Commit what the last pass has left in operations; a later loss of the step does not change it."""
        self._asked = False
        for operation in self._layout.operations:
            if type(operation) is not AllReduceOperation:  # which keeps nothing
                operation.commit()

    def end_step(self) -> None:
        """End the step before: commit or void its operations."""
        if self._asked:  # and has not stepped: it had, before the step was drawn again
            self.void()
            return
        for operation in self._layout.operations:
            if type(operation) is not AllReduceOperation:
                operation.commit()

    def void(self) -> None:
        """Discard what the last passes have left in operations."""
        self._asked = False
        self._works = [[] for _ in self._layout.buckets]
        for operation in self._layout.operations:
            operation.void()
