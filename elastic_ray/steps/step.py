"""Step of a loader pass: how many samples each rank takes (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.state.progress import PassProgress


@dataclasses.dataclass(slots=True)
class LoaderStep:
    """The step in progress of one loader pass.

    Attributes:
        total: samples in the pass.
        sizes: ``sizes[rank][micro]`` samples of each rank's micro-batches.
        scale: global / initial batch size, by the loader's setting (a short last step does not change it).
        init_batch_size: global batch that the user's learning rate belongs to.
        shape: how the loader cuts its full steps on each rank.
        ordinal: how many loader passes of the epoch had begun when the step did.
        can_switch: whether a group of a given size may begin after the step.
        leads: the loader leads the job: its steps are the training's.
        whole: each rank takes one whole batch, for evaluation; in a pass's last step some may have none.
        micro: the micro-step in progress.
        sample_tag: of what all ranks read alike for it, 0 where there is no such thing.
        hashed: gives the sum of the hashes of this rank's indices, once its batches are fetched; None where the loader
            does not know indices.
        population: samples that the pass draws from without replacement; None where that is not known.
        own_counts, counts: what the loop weighs micro-batches by: of this rank, and of all ranks once they are known.
        count: samples of the whole step.
        micro_steps: micro-batches that a rank takes in it.
        is_last_micro: whether gradients are synchronised in the present micro-step.
        weighed: whether the loop weighs this rank's micro-batches itself.
        to_come: gives the samples of the pass's steps from this one on, at most so many; None where they are not known.
        taken: it is another rank's, which is late: this one makes it beside its own.
        given: it is this rank's, and another one makes it.
        halved: whether it is cut into more micro-batches than its shape has, to measure the gradient's noise.
    """

    loader_pass: PassProgress
    total: int
    sizes: Sequence[Sequence[int]]
    scale: float
    init_batch_size: int
    shape: BatchChoice
    ordinal: int
    can_switch: Callable[[int], bool]
    leads: bool = False
    whole: bool = False
    micro: int = 0
    sample_tag: int = 0
    population: int | None = None
    hashed: Callable[[], int] | None = None
    to_come: Callable[[int], Sequence[int]] | None = None
    taken: bool = False
    given: bool = False
    own_counts: list[float] = dataclasses.field(default_factory=list)
    counts: Sequence[Sequence[float]] | None = None
    _backward: int = -1  # the latest micro-batch that had a backward pass
    count: int = dataclasses.field(init=False)
    micro_steps: int = dataclasses.field(init=False)
    is_last_micro: bool = dataclasses.field(init=False)
    weighed: bool = dataclasses.field(init=False)
    halved: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.count = sum(map(sum, self.sizes))
        self.micro_steps = len(self.sizes[0])
        self.weighed = bool(self.own_counts)
        self.halved = self.micro_steps > self.shape.accum_steps + 1
        self.is_last_micro = self.micro == self.micro_steps - 1

    def give_away(self) -> None:
        """Leave this rank's part of the step to another one."""
        self.given, self.hashed = True, None if self.hashed is None else int

    def begin_micro(self, micro: int) -> None:
        """Start a micro-step, before its micro-batch is handed out."""
        self.micro, self.is_last_micro = micro, micro == self.micro_steps - 1

    def weigh(self, count: float) -> None:
        """Give the present micro-batch this weight in the step's mean gradient, in place of its samples.

        Raises RuntimeError: it has one already, or an earlier one of the step has none, or its gradient is there.
        """
        if self._backward == self.micro:
            raise RuntimeError(
                "loader.weigh(n) must be called before backward(), which has taken the micro-batch for its samples"
            )
        if len(self.own_counts) > self.micro:
            raise RuntimeError("loader.weigh(n) was called twice for one micro-batch")
        if len(self.own_counts) < self.micro:
            raise RuntimeError(
                "loader.weigh(n) was not called for an earlier micro-batch of this step: call it for each, or for none"
            )
        self.own_counts.append(count)
        self.weighed = True

    def begin_backward(self) -> None:
        """Start a backward pass of the present micro-batch, with the weight that it has by now."""
        self._backward = self.micro

    def take_counts(self, counts: Sequence[Sequence[float]]) -> None:
        """Store the weights of all summed ranks, which make the loop's weights exact."""
        self.counts = counts

    @property
    def work(self) -> Sequence[Sequence[float]]:
        """``work[rank][micro]``: what the loop has given on all ranks, else samples."""
        return self.counts if self.counts is not None and len(self.counts) == len(self.sizes) else self.sizes

    @property
    def counted(self) -> float | None:
        """Weight that the loop has given on all ranks together; None where they have not exchanged it."""
        if len(self.sizes) == 1:
            return sum(self.own_counts)
        known = self.counts is not None and len(self.counts) == len(self.sizes)
        return sum(map(sum, self.counts)) if known and self.counts is not None else None

    @property
    def sample_scale(self) -> float:
        """Samples of this very step / initial batch size."""
        return self.count / self.init_batch_size

    @property
    def equal_bsz(self) -> int:
        """Largest micro-batch if all ranks took equally many samples."""
        return -(-self.count // (len(self.sizes) * self.micro_steps))

    @property
    def samples_left(self) -> int:
        """Samples of the pass that are not used yet, those of this step included."""
        return self.total - self.loader_pass.position

    @property
    def leaves_ranks_idle(self) -> bool:
        """True if some ranks, the last ones, have no samples in this step."""
        return not self.sizes[-1][0]

    def is_idle(self, rank: int) -> bool:
        """True if a rank has no samples in this step."""
        return not self.sizes[rank][0]

    def weight(self, rank: int) -> float:
        """Share of a rank's present micro-batch in the step's mean gradient (by samples, not by ranks).

        Where the loop weighs micro-batches, this rank's until :attr:`counts` are known is not its share yet, but as
        much for each unit of its count as for a sample: the shares of a step's earlier micro-batches are right but for
        one factor, ``count / sum of the counts``.
        """
        if not self.own_counts:
            return self.sizes[rank][self.micro] / self.count
        if self.counts is None:
            return self.own_counts[self.micro] / self.count
        return _part(self.counts[rank][self.micro], sum(map(sum, self.counts)))

    def own_weight(self, rank: int) -> float:
        """Return the present micro-batch's weight among the rank's own samples in the step; as :meth:`weight`."""
        if not self.own_counts:
            return self.sizes[rank][self.micro] / sum(self.sizes[rank])
        if self.counts is None:
            return self.own_counts[self.micro] / self.count
        return _part(self.own_counts[self.micro], sum(self.own_counts))


def _part(count: float, total: float) -> float:
    """Return the fraction `count / total`, or 0 if the total is 0."""
    return count / total if total > 0 else 0.0
