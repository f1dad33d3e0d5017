"""A model's buckets as a plan lays them out, and the tail of control values that travels with them (torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.batch.device_numbers import Number, read, read_with
from elastic_ray.state.layout import digest
from elastic_ray.sync.engine.factory import carries_tail, make_bucket, make_operation
from elastic_ray.sync.operations.bucket_operation import BucketOperation, GradientBucket
from elastic_ray.sync.operations.buckets import Bucket
from elastic_ray.sync.operations.owing import SettlingOperation
from elastic_ray.sync.plan import SyncPlan
from elastic_ray.sync.sliced_gradients.sliced_bucket import SlicedBucket

if TYPE_CHECKING:
    from elastic_ray.sync.engine.joint_optimizer import JointTiles
    from elastic_ray.sync.optimizer_tiles.tiled_optimizer import TiledOptimizer
    from elastic_ray.sync.statistics.gradient_statistics import GradientStatistics
    from elastic_ray.sync.switching.strategy_in_force import StrategyInForce


class BucketLayout:
    """Buckets of one model in memory, with the control values that travel with them.

    The tail holds control values, squared norms of local gradients, rank 0's statistics, the step's tag, and which
    parameters were used. It rides on the last bucket's reduction where that adds it up exactly; else it is a buffer of
    its own, to be reduced by itself.

    Args:
        groups: parameters of each parameter group, in the model's order.
        plan: of them, one after the other.
        control_size: number of control values.
        sequel: what follows the reductions.
        statistics: what rides of the gradients' statistics.
        owners: of the optimizer state.

    Attributes:
        buckets: in the order of reduction.
        sliced: those of which each rank receives a part of the mean.
        operations: one for each.
        sequel: as given.
        tail_rides: whether the last bucket holds it.
        strategy: what a user calls the plan's.
        norms, shared, step_tag: where these lie in the tail.
        own_sum: where the sum of what ranks have put in lies, by which all know whether that is finite; flags of used
            parameters follow.
        no_norms, nothing_to_share: values for them.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.nn.Parameter]],
        plan: SyncPlan,
        control_size: int,
        sequel: StrategyInForce,
        statistics: GradientStatistics,
        owners: TiledOptimizer | JointTiles,
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
                each,
                index,
                [params[i] for i in each.params],
                size if index == last and self.tail_rides else 0,
                owners,
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
        """Digest of the layout, which must be equal on all ranks."""
        return digest((*self._layout, self.sequel.takes))

    def settle_first(self, index: int) -> SettlingOperation:
        """Have a bucket's next pass add what a strategy before has left owed."""
        settling = SettlingOperation(self.operations[index])
        self.operations[index] = settling
        return settling

    @property
    def tail(self) -> torch.Tensor:
        """The tail, where it lies at present."""
        last = self.buckets[-1]
        if self.tail_rides and isinstance(last, Bucket):
            self._numbers = last.tail_numbers
            return last.tail
        self._numbers = self._own_tail.numpy() if self._own_tail.device.type == "cpu" else None
        return self._own_tail

    def release(self) -> None:
        """Give memory for reductions back until there are any."""
        for bucket in self.buckets:
            bucket.release()

    def write_tail(
        self, head: Sequence[float], norms: Sequence[Number], own_sum: Number, used: Sequence[bool] | None
    ) -> None:
        """Write what rides on the reduction.

        Args:
            head: values up to the sum of what this rank has put in, without norms.
            norms: of local gradients; empty for none.
            own_sum: the sum.
            used: which parameters have a gradient; None for all.
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
        """Read the tail's sums, as far as all steps need them, and ``numbers``; with one wait for the tail's GPU."""
        if self._numbers is not None:
            return self._numbers[: self.own_sum + 1].tolist(), read(numbers) if numbers else []
        self._sums, found = read_with(self.tail, numbers)
        return self._sums, found

    def used_anywhere(self) -> list[bool]:
        """Return which parameters have a gradient on any rank, after :meth:`read_tail`."""
        sums = self._sums if self._numbers is None else self._numbers.tolist()
        return [count > 0 for count in sums[self.own_sum + 1 :]]

    def replace_buffers(self) -> None:
        """Leave all memory to reductions that were given up and may still write to it."""
        for bucket in self.buckets:
            bucket.replace_buffer()
        self._own_tail = self._own_tail.clone()


def hooks_on_gradients(params: Sequence[torch.nn.Parameter], hook: Callable[[torch.Tensor], None]) -> list[Any]:
    """Have ``hook`` called with each parameter that has got its gradient in a backward pass; returns the handles."""
    handles = []
    for param in params:
        trained = param.requires_grad
        param.requires_grad_(True)  # torch takes no hook for one that is frozen for the moment
        handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        param.requires_grad_(trained)
    return handles
