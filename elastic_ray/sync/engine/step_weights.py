"""Weights of micro-batches in a step's mean gradient, as the loop gives them (``loader.weigh``) (torch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.state.layout import digest
from elastic_ray.sync.engine.layout import BucketLayout
from elastic_ray.sync.engine.summing_group import SummingGroup
from elastic_ray.sync.operations.bucket_operation import GradientBucket
from elastic_ray.sync.statistics.gradient_statistics import GradientStatistics

if TYPE_CHECKING:
    from elastic_ray.consensus.consensus import RankConsensus
    from elastic_ray.steps.step import LoaderStep


class StepWeights:
    """Computes each micro-batch's weight in the mean gradient.

    Counts of all ranks are exchanged once a step, before its first bucket is filled.

    Args:
        group: whose gradients are added up.
        consensus: waits.
        statistics: of the gradients, which count with their shares.
    """

    def __init__(self, group: SummingGroup, consensus: RankConsensus, statistics: GradientStatistics) -> None:
        self._group, self._consensus, self._statistics = group, consensus, statistics
        self.factor = 1.0  # what shares of the step's earlier micro-batches are still to be multiplied with

    def begin_pass(self, step: LoaderStep) -> None:
        """Start a backward pass of a step whose micro-batches the loop weighs.

        Raises RuntimeError: the loop has weighed earlier micro-batches of the step, and not this one.
        """
        if not step.micro:
            self.factor = 1.0
        if len(step.own_counts) <= step.micro:
            raise RuntimeError(
                "loader.weigh(n) must be called before backward() in each micro-batch of a step, or in none: it was "
                f"for {len(step.own_counts)}, and not for the one that follows"
            )

    def share(self, step: LoaderStep | None, *, reduces: bool) -> float:
        """Return the weight of the step's last micro-batch on this rank.

        Args:
            step: the step; None outside of steps, where all ranks weigh alike.
            reduces: whether gradients of several ranks are added up, all of which come here.
        """
        if step is None:
            return 1.0 / self._group.world_size
        if not step.weighed:
            return self._group.share(step)
        if step.counts is None:
            own = list(step.own_counts)
            counts = self._of_all(own) if reduces else [own]
            total = sum(map(sum, counts))
            self.factor = step.count / total if total > 0 else 0.0
            self._statistics.scale_carried(self.factor)
            step.take_counts(counts)
        return self._group.share(step)

    @torch.no_grad()
    def leave_out(self, step: LoaderStep, buckets: Sequence[GradientBucket]) -> bool:
        """True if this rank trains alone and the step's only micro-batch has weight 0; sets ``.grad`` to 0 then.

        It is what several ranks would have added up: the gradient of a mean over nothing may be no number.
        """
        if not step.is_last_micro or any(step.own_counts):
            return False
        for bucket in buckets:
            for param in bucket.params:
                if param.grad is not None:
                    param.grad.zero_()
        return True

    def _of_all(self, own: list[float]) -> list[list[float]]:
        """Exchange the weights of all ranks' micro-batches and return them by rank."""
        told = torch.zeros(self._group.world_size, len(own), dtype=torch.float64)
        told[self._group.group.rank] = torch.tensor(own, dtype=torch.float64)
        self._consensus.wait(self._group.group.communicator.gradients.all_reduce(told))
        found: list[list[float]] = told.tolist()
        return found


class Announcements:
    """Announcement values of a pass: with weights, a rank makes one more collective than without.

    Args:
        layout: of its buckets, in the present group.

    Attributes:
        plain, weighed: what a pass announces whose micro-batches weigh as many as their samples, or as the loop says.
    """

    def __init__(self, number: int, layout: BucketLayout) -> None:
        plain, strategy = layout.digest, layout.strategy
        weighed = digest((plain, "weighed")), f"{strategy}, weighed by loader.weigh()"
        self.plain = Announced(Intent.GRADIENTS, number, plain, strategy)
        self.weighed = Announced(Intent.GRADIENTS, number, *weighed)


def refuse_weights(step: LoaderStep | None) -> None:
    """Refuse weights in a step whose backward pass only adds to this rank's gradients.

    Raises RuntimeError: the loop weighs its micro-batch.
    """
    if step is not None:
        step.begin_backward()
    if step is not None and step.weighed:
        raise RuntimeError(
            "loader.weigh(n) cannot be called in a step whose backward() is within no_sync(): there gradients of "
            "several steps are added up as they are. Let the loader accumulate: autoscale_batch_size(..., "
            "gradient_accumulation=True)"
        )
