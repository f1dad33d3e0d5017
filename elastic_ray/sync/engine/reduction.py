"""Model buckets as laid out by the plan, their collectives, and the control values sent with them (torch)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.state.layout import digest
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.device_numbers import Number, read, read_with
from elastic_ray.sync.operations.bucket_operation import BucketOperation, GradientBucket, WireForm
from elastic_ray.sync.operations.buckets import AllReduceOperation, Bucket
from elastic_ray.sync.operations.int8 import Int8Compression
from elastic_ray.sync.operations.low_rank import LowRankCompression
from elastic_ray.sync.operations.owing import CompressedOperation, OwingOperation, SettlingOperation
from elastic_ray.sync.operations.partitioned_reduce import OwnerOperation, PartitionedReduceOperation
from elastic_ray.sync.operations.topologies import RoutedReduceOperation
from elastic_ray.sync.plan import BucketPlan, SyncPlan
from elastic_ray.sync.sliced_gradients.operation import SlicedBucket, SlicedOperation
from elastic_ray.sync.spec import Owner, Reduce, Rows
from elastic_ray.sync.statistics.gradient_statistics import GradientStatistics
from elastic_ray.sync.tables.row_bucket import RowBucket
from elastic_ray.sync.tables.rows_operation import RowsOperation
from elastic_ray.sync.tables.table_gradient import TableGradient

if TYPE_CHECKING:
    from elastic_ray.consensus.consensus import RankConsensus
    from elastic_ray.run.run import Run
    from elastic_ray.steps.step import LoaderStep
    from elastic_ray.sync.averaging.drift import Drift
    from elastic_ray.sync.optimizer_tiles.tiled_optimizer import TiledOptimizer
    from elastic_ray.sync.switching.strategy_in_force import StrategyInForce


def carries_tail(plan: BucketPlan, dtype: torch.dtype) -> bool:
    """True if control values can be sent with a bucket of this dtype because its reduction sums them exactly."""
    return is_plain(plan) and dtype.to_real() in (torch.float32, torch.float64)


def is_plain(plan: BucketPlan) -> bool:
    """True if the bucket's own buffer is all-reduced in one piece, unchanged, and has no other use."""
    return isinstance(plan.sync, Reduce) and plan.sync.wire.exact and plan.sync.parts == 1


def make_bucket(
    plan: BucketPlan, index: int, params: Sequence[torch.nn.Parameter], tail: int, tiles: Sequence[TiledOptimizer]
) -> GradientBucket:
    """Return the bucket for a plan, with ``tail`` extra elements for control values."""
    if isinstance(plan.sync, Rows):
        return RowBucket(index, plan.group, TableGradient(params[0], plan.sync.update))
    if isinstance(plan.sync, Owner) and plan.sync.owns_tiles:
        return SlicedBucket(index, plan.group, params, tiles)
    return Bucket(index, plan.group, params, tail, shows=is_plain(plan))


def make_operation(plan: BucketPlan) -> BucketOperation:
    """Return the operation that reduces a bucket as planned. Raises StrategyError if no such operation exists."""
    sync = plan.sync
    if isinstance(sync, Reduce):
        if sync.topology != "native" and len(plan.nodes) > 1:
            return RoutedReduceOperation(sync.topology, plan.nodes)
        return _reduction(sync, plan.params)
    if isinstance(sync, Owner) and sync.owns_tiles:
        return SlicedOperation(sync.copies, WireForm(sync.wire.dtype))
    if isinstance(sync, Owner):
        return OwnerOperation(plan.owner, WireForm(sync.wire.dtype))
    if isinstance(sync, Rows):
        return RowsOperation()
    raise StrategyError(f"there is no operation for {sync}")


def _reduction(sync: Reduce, places: Sequence[int]) -> BucketOperation:
    """Return the operation for an all-reduce: plain, partitioned or compressed."""
    wire = sync.wire
    if wire.compresses:
        compression = LowRankCompression(wire.rank) if wire.rank else Int8Compression()
        return CompressedOperation(compression, places)
    if sync.parts == 1 and wire.exact:
        return AllReduceOperation()
    axis = sync.axis if sync.parts > 1 else 0
    return PartitionedReduceOperation(sync.parts, axis, sync.seed, places, WireForm(wire.dtype))


class BucketLayout:
    """One model's buckets in memory, with the control values sent along with them.

    The tail holds control values, squared norms of local gradients, rank 0's statistics, the step's tag, and flags for
    used parameters. It is part of the last bucket if that bucket's reduction sums it exactly. Otherwise, it is a
    separate buffer with its own all-reduce.

    Attributes:
        sliced: Buckets where each rank receives only a part of the mean.
        tail_rides: Whether the tail is part of the last bucket.
        strategy: Name of the plan's strategy, as shown to the user.
        own_sum: Tail position of the sum of all gradient elements, which shows whether they are finite. The flags for
            used parameters follow this sum.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.nn.Parameter]],
        plan: SyncPlan,
        control_size: int,
        sequel: StrategyInForce,
        statistics: GradientStatistics,
        tiles: Sequence[TiledOptimizer],
    ) -> None:
        params = [p for group in groups for p in group]
        if not params:
            raise ValueError("model must have at least one parameter that requires a gradient")
        self.sequel = sequel
        self.norms = slice(control_size, control_size + statistics.norms_size)
        self.shared = slice(self.norms.stop, self.norms.stop + statistics.shared_size)
        self.step_tag = slice(self.shared.stop, self.shared.stop + 2)
        self.own_sum = self.step_tag.stop
        self.no_norms = [0.0] * statistics.norms_size
        self.nothing_to_share = [0.0] * statistics.shared_size
        self._count = len(params)
        size = self.own_sum + 1 + len(params)
        last = len(plan.buckets) - 1
        self.tail_rides = carries_tail(plan.buckets[last], params[plan.buckets[last].params[0]].dtype)
        self.buckets: list[GradientBucket] = [
            make_bucket(
                each, index, [params[i] for i in each.params], size if index == last and self.tail_rides else 0, tiles
            )
            for index, each in enumerate(plan.buckets)
        ]
        self.sliced = [bucket for bucket in self.buckets if isinstance(bucket, SlicedBucket)]
        self.operations: list[BucketOperation] = [make_operation(each) for each in plan.buckets]
        self._own_tail = torch.zeros(size, dtype=torch.float32, device=params[0].device)
        self._sums: list[float] = []
        self._numbers: Any = None
        layout = [(b.index, b.group, str(b.dtype), [tuple(p.shape) for p in b.params]) for b in self.buckets]
        self._layout = (layout, size, plan.digest, sequel.agenda)
        name = plan.strategy.label
        self.strategy = f"auto, now {name}" if sequel.agenda and name != "auto" else name

    @property
    def digest(self) -> int:
        """Digest of the layout, which must be the same on all ranks."""
        return digest((*self._layout, self.sequel.takes))

    def send_residual_first(self, index: int) -> SettlingOperation:
        """Wrap bucket ``index``'s operation, so that its next pass also sends gradients left by an earlier strategy."""
        settling = SettlingOperation(self.operations[index])
        self.operations[index] = settling
        return settling

    @property
    def tail(self) -> torch.Tensor:
        """Tail (extra elements) that holds the control values, in its current location in memory."""
        last = self.buckets[-1]
        if self.tail_rides and isinstance(last, Bucket):
            self._numbers = last.memory.tail_numbers
            return last.memory.tail
        self._numbers = self._own_tail.numpy() if self._own_tail.device.type == "cpu" else None
        return self._own_tail

    def release(self) -> None:
        """Free the reduction buffers until they are needed again."""
        for bucket in self.buckets:
            bucket.release()

    def write_tail(
        self, head: Sequence[float], norms: Sequence[Number], own_sum: Number, used: Sequence[bool] | None
    ) -> None:
        """Write the values to be sent with the reduction into the tail.

        Args:
            head: Values that precede ``own_sum`` in the tail, with zeros in place of the norms.
            norms: Squared norms of local gradients; empty if they are not measured.
            own_sum: Sum of this rank's gradient elements.
            used: For each parameter, whether it has a gradient; None if all have one.
        """
        tail = self.tail
        if self._numbers is not None:
            self._numbers[: self.own_sum] = head
            self._numbers[self.own_sum] = float(own_sum)
            self._numbers[self.own_sum + 1 :] = 1.0 if used is None else used
            if norms:
                self._numbers[self.norms] = read(norms)
            return
        # From memory that is pinned a GPU takes them by itself, and nobody waits.
        flags = [True] * self._count if used is None else used
        told = torch.tensor([*head, 0.0, *flags], dtype=tail.dtype, pin_memory=tail.is_cuda)
        tail.copy_(told, non_blocking=True)
        for at, norm in [*enumerate(norms, self.norms.start), (self.own_sum, own_sum)]:
            if isinstance(norm, torch.Tensor):  # a frozen group's has none
                tail[at].copy_(norm)

    def read_tail(self, numbers: Sequence[Number]) -> tuple[list[float], list[float]]:
        """Return the tail's sums up to ``own_sum``, and ``numbers`` as floats, with a single wait for the GPU."""
        if self._numbers is not None:
            return self._numbers[: self.own_sum + 1].tolist(), read(numbers) if numbers else []
        self._sums, found = read_with(self.tail, numbers)
        return self._sums, found

    def used_anywhere(self) -> list[bool]:
        """Return, for each parameter, whether any rank had a gradient; valid after :meth:`read_tail`."""
        sums = self._sums if self._numbers is None else self._numbers.tolist()
        return [count > 0 for count in sums[self.own_sum + 1 :]]

    def replace_buffers(self) -> None:
        """Allocate new buffers, because abandoned reductions may still be writing to the old ones."""
        for bucket in self.buckets:
            bucket.replace_buffer()
        self._own_tail = self._own_tail.clone()


def hooks_on_gradients(params: Sequence[torch.nn.Parameter], hook: Callable[[torch.Tensor], None]) -> list[Any]:
    """Register ``hook`` to run each time a parameter's gradient is accumulated; return the handles."""
    handles = []
    for param in params:
        trained = param.requires_grad
        param.requires_grad_(True)  # torch takes no hook for one that is frozen for the moment
        handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        param.requires_grad_(trained)
    return handles


PROBE_EVERY = 32
"""Steps of which one is sent uncompressed, for statistics of gradients."""


class Reduction:
    """Collectives for one backward pass, and the state that operations keep between steps.

    All methods raise CommunicationFailedError if the group breaks.

    The operations' state is committed once the optimizer has applied their results, or once the step has ended and its
    gradients are waiting for a later step. It does not change if a step is drawn again after the optimizer has applied
    it, or if a pass's sum is not finite.
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
        self.asked = False  # the optimizer was, after the last pass
        self._finite: bool | None = None  # what that pass gave; None until it was looked at
        self.written: set[int] = set()  # positions of buckets whose sums are in ``.grad`` already
        # sums over the elements of what the last pass gave, by which :meth:`check_totals` knows whether it is finite;
        # none where that is known
        self.totals: list[torch.Tensor] = []
        self._began_s = [0.0] * len(layout.buckets)
        self._took_s = list(self._began_s)

    def start_step(self, steps: int) -> bool:
        """Start a step; return True if its gradients are sent uncompressed, which allows measuring statistics."""
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
        """Number of steps from one measurement of gradient statistics to the next; above 1 with compression."""
        return PROBE_EVERY if self._compresses and self._group.world_size > 1 else 1

    def launch(self, index: int) -> None:
        """Start the first round of collectives for filled bucket `index`; the last bucket may include the tail."""
        layout, gradients = self._layout, self._group.group.communicator.gradients
        self._began_s[index] = time.perf_counter()
        if index == 0:
            self.asked, self._finite, self.written = False, None, set()
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
        """Wait for the collectives, and run further rounds until every bucket holds its sum.

        The number of rounds is the same on all ranks. While later buckets are in flight, finite sums of finished
        buckets are already written to ``.grad``.

        Args:
            checks: Whether to check that the summed gradients are finite. Buckets are skipped if each rank has already
                summed its elements, because the total of these sums shows the same.
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
                    more = operations[index].next_round(bucket, communicator.gradients, finished)
                    self._works[index] = list(more)
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
        if self._layout.sliced and not self._report_sizes() and looks:
            self._finite = False
        if looks and self._finite is None and not self.totals and not told:
            self._finite = True
        if self.owing and not self.is_finite():
            for owing in self.owing:
                owing.drop()
        sequel = self._layout.sequel
        sequel.bucket_s.append(tuple(self._took_s))
        if sequel.tuner is not None:
            sequel.tuner.reduced()

    def _report_sizes(self) -> bool:
        """Sum the statistics of sliced gradients, which no rank holds in full; return True if all are finite."""
        mine = [bucket.numbers() for bucket in self._layout.sliced]
        told = torch.cat(mine)
        self._consensus.announcer.wait(self._group.group.communicator.gradients.all_reduce(told))
        for bucket, numbers in zip(self._layout.sliced, torch.split(told, [len(each) for each in mine]), strict=True):
            bucket.know(numbers)
        return all(bucket.finite for bucket in self._layout.sliced)

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Return the sums of several numbers over all ranks; called on every rank."""
        told = torch.tensor(list(values), dtype=torch.float64)
        self._consensus.announcer.wait(self._group.group.communicator.gradients.all_reduce(told))
        found: list[float] = told.tolist()
        return found

    def is_finite(self) -> bool:
        """True if the last pass produced finite gradients; the same on all ranks."""
        if self._finite is None:
            self.check_totals(read(self.totals or [bucket.total() for bucket in self._layout.buckets]))
        return self._finite is True

    def check_totals(self, values: Sequence[float]) -> None:
        """Determine whether the pass was finite, given ``values``, the sums of :attr:`totals` over all ranks.

        Because a sum can overflow when no gradient has, all buckets are checked if the sum of ``values`` is not finite.
        """
        if values and self._finite is None:
            # A sum may overflow where no gradient has.
            self._finite = math.isfinite(sum(values)) or all(bucket.is_finite() for bucket in self._layout.buckets)

    def nonfinite_ranks(self) -> list[int] | None:
        """Return the ranks that had non-finite gradients in the last pass; None if the sum over all ranks is finite."""
        if self._finite or self.is_finite():
            return None
        own = [int(not all(bucket.own_is_finite() for bucket in self._layout.buckets))]
        rows = self._group.group.communicator.gather_ints(own, with_gradients=True)
        return [rank for rank, (bad,) in enumerate(rows) if bad]

    def complete(self) -> None:
        """Add compression residuals to the local gradients, if these are not summed with those of other ranks.

        When models are averaged, each rank's update is weighted by 1 / (number of ranks), so the residual is multiplied
        by the number of ranks.
        """
        if self._group.world_size == 1:
            scale = self._grad_scale() * len(self._group.group.nodes)
            for bucket, operation in zip(self._layout.buckets, self._layout.operations, strict=True):
                if isinstance(operation, OwingOperation):
                    operation.complete(bucket, scale)

    def applied(self) -> None:
        """Commit the operations' state after the last pass, so that losing the step later does not change it."""
        self.asked = False
        for operation in self._layout.operations:
            if type(operation) is not AllReduceOperation:  # which keeps nothing
                operation.commit()

    def end_step(self) -> None:
        """End the previous step, committing or discarding the state of its operations."""
        if self.asked:  # and has not stepped: it had, before the step was drawn again
            self.void()
            return
        for operation in self._layout.operations:
            if type(operation) is not AllReduceOperation:
                operation.commit()

    def void(self) -> None:
        """Discard the changes made to the operations' state (such as residuals) in the current step's passes."""
        self.asked = False
        self._works = [[] for _ in self._layout.buckets]
        for operation in self._layout.operations:
            operation.void()


class StepWeights:
    """Weights of micro-batches in a step's mean gradient.

    All ranks exchange their counts once per step, before the first bucket is filled.

    Args:
        statistics: Gradient statistics, which must be scaled if earlier micro-batches' weights change.
    """

    def __init__(self, group: SummingGroup, consensus: RankConsensus, statistics: GradientStatistics) -> None:
        self._group, self._consensus, self._statistics = group, consensus, statistics
        self.factor = 1.0  # what shares of the step's earlier micro-batches are still to be multiplied with
        self._of: LoaderStep | None = None  # step that the factor is of

    def start_pass(self, step: LoaderStep) -> None:
        """Start a backward pass in a step whose micro-batches are weighted by the loop.

        Raises RuntimeError if the loop weighted earlier micro-batches of the step, but not this one.
        """
        if not step.micro:
            self.factor = 1.0
        if len(step.own_counts) <= step.micro:
            raise RuntimeError(
                "loader.weigh(n) must be called before backward() in each micro-batch of a step, or in none: it was "
                f"called for {len(step.own_counts)}, and not for the one that follows"
            )

    def share(self, step: LoaderStep | None, *, reduces: bool) -> float:
        """Return the weight of this rank's current micro-batch in the step's mean gradient.

        Args:
            step: Current step; None outside steps, where all ranks have equal weights.
            reduces: Whether gradients from several ranks are summed. If so, all of these ranks must call this method.
        """
        if step is None:
            return 1.0 / self._group.world_size
        if not step.weighed:
            return self._group.share(step)
        if step.counts is None:
            own = list(step.own_counts)
            step.counts = self._of_all(own) if reduces else [own]
        if self._of is not step:  # another model's pass may have exchanged the counts
            total = sum(map(sum, step.counts))
            self._of, self.factor = step, step.count / total if total > 0 else 0.0
            self._statistics.scale_carried(self.factor)
        return self._group.share(step)

    @torch.no_grad()
    def leave_out(self, step: LoaderStep, buckets: Sequence[GradientBucket]) -> bool:
        """Set ``.grad`` to 0 and return True if this rank is training alone and no sample in its step has any weight.

        The gradient of a mean over no samples may be NaN. With several ranks, the sum is 0 without this.
        """
        if not step.is_last_micro or any(step.own_counts):
            return False
        for bucket in buckets:
            for param in bucket.params:
                if param.grad is not None:
                    param.grad.zero_()
        return True

    def _of_all(self, own: list[float]) -> list[list[float]]:
        """Exchange micro-batch weights with all ranks and return them in rank order."""
        told = torch.zeros(self._group.world_size, len(own), dtype=torch.float64)
        told[self._group.group.rank] = torch.tensor(own, dtype=torch.float64)
        self._consensus.announcer.wait(self._group.group.communicator.gradients.all_reduce(told))
        found: list[list[float]] = told.tolist()
        return found


def refuse_weights(step: LoaderStep | None) -> None:
    """Raise RuntimeError if the loop has set a weight for a micro-batch with gradients that are only accumulated."""
    if step is not None:
        step.backward = step.micro
    if step is not None and step.weighed:
        raise RuntimeError(
            "loader.weigh(n) cannot be called in a step whose backward() is within no_sync(): there gradients of "
            "several steps are added up as they are. Let the loader accumulate: autoscale_batch_size(..., "
            "gradient_accumulation=True)"
        )


class SummingGroup:
    """Group of ranks whose gradients are summed; this rank alone while replicas diverge.

    A lone rank reduces nothing, and its ``.grad`` is the mean over its own samples.
    """

    def __init__(self, context: Run, model: Drift) -> None:
        self.group = context.group  # the present group, whoever is added up
        self.model = model

    @property
    def drifts(self) -> bool:
        """True while each rank is updating its replica with local gradients only."""
        return self.model.average is not None and self.model.on

    @property
    def world_size(self) -> int:
        """Number of ranks whose gradients are summed."""
        return self.group.world_size if self.model.average is None or not self.model.on else 1

    def share(self, step: LoaderStep) -> float:
        """Return the current micro-batch's weight in the step's mean, or in this rank's mean if replicas diverge."""
        return step.own_weight(self.group.rank) if self.drifts else step.weight(self.group.rank)
