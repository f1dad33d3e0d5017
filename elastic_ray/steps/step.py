"""Steps of a loader pass: samples of each rank, and times; no clock but the monotonic one is read here."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.events import Pause
from elastic_ray.state.progress import PassProgress


@dataclasses.dataclass(slots=True)
class LoaderStep:
    """The step in progress of one loader pass.

    Attributes:
        sizes: ``sizes[rank][micro]`` samples of each rank's micro-batches.
        scale: global / initial batch size, by the loader's setting (a short last step does not change it).
        init_batch_size: global batch that the user's learning rate belongs to.
        shape: how the loader cuts its full steps on each rank.
        ordinal: how many loader passes of the epoch had begun when the step did.
        can_switch: whether a group of a given size may begin after the step.
        leads: the loader leads the job: its steps are the training's.
        whole: each rank takes one whole batch, for evaluation; in a pass's last step some may have none.
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


_KEPT = 64
# The first steps after a change pay for caches, allocations and data workers.
_WARM_UP = 2


class StepClock:
    """Collects step and micro-step times [s] of one batch shape and strategy; starts afresh at every change."""

    def __init__(self) -> None:
        self._last_edge_s: float | None = None
        self._change_s: float | None = None
        self._stands_s: float | None = None
        self._resumed_s: float | None = None
        self.generation = 0  # of the group that the steps were made in; 0 before the first
        # of the first step after the last change of group; None before it was committed
        self.first_step_s: float | None = None
        self._last_micro_s: float | None = None
        self._shape: BatchChoice | None = None
        self.strategy = ""
        self.uneven = False
        self.batch_size = 0
        self._skip = _WARM_UP
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._micros: deque[float] = deque(maxlen=_KEPT)

    def edge(
        self,
        shape: BatchChoice | None,
        micro_steps: int,
        samples: int,
        strategy: str | None,
        *,
        uneven: bool = False,
        steps: int = 1,
    ) -> None:
        """Record the end of a committed step, or of several.

        Args:
            shape: of the batch; None when it trained nothing (evaluation).
            strategy: tells ways of synchronising apart; None while one is being chosen, for such steps do not count.
            uneven: its ranks had unequal shares; such times are not mixed with others.
            steps: that were committed together; their mean time counts.
        """
        now_s = time.monotonic()
        self._change_s = self._stands_s = None  # a change that was put off
        if self._resumed_s is not None:
            self.first_step_s, self._resumed_s = now_s - self._resumed_s, None
        if strategy is None:
            shape = None
        elif shape is not None and strategy != self.strategy:
            self._restart(shape)
            self.strategy = strategy
        if (shape is not self._shape and shape != self._shape) or uneven != self.uneven:
            self._restart(shape)
            self.uneven = uneven
        elif shape is not None and self._last_edge_s is not None and micro_steps == shape.accum_steps + 1:
            if self._skip:
                self._skip -= 1
            else:
                self._steps.append((now_s - self._last_edge_s) / steps)
                self.batch_size = max(samples, self.batch_size)
        self._last_edge_s, self._last_micro_s = now_s, now_s

    def micro(self) -> None:
        """Record the end of a micro-step that does not synchronise."""
        now_s = time.monotonic()
        if self._last_micro_s is not None and not self._skip:
            self._micros.append(now_s - self._last_micro_s)
        self._last_micro_s = now_s

    def change_begins(self) -> None:
        """Record the start of a change of group, agreed or after a failure."""
        self._change_s = time.monotonic() if self._change_s is None else self._change_s

    def group_stands(self) -> None:
        """Record that a new group has been formed; if it breaks before its ranks are identical, another one follows."""
        self._stands_s = time.monotonic()

    def resume(self, generation: int) -> Pause:
        """Resume in a new generation.

        Return the time since the last committed step by its parts, 0 where there is none.

        The parts are differences of one clock's readings, so that they sum to the whole.
        """
        now_s, last_s = time.monotonic(), self._last_edge_s
        self._restart(self._shape)
        self.generation, self.first_step_s, self._resumed_s = generation, None, None
        pause = Pause()
        if last_s is not None:
            stands_s = self._stands_s if self._stands_s is not None else now_s
            change_s = self._change_s if self._change_s is not None else stands_s
            pause = Pause(vote_s=change_s - last_s, group_s=stands_s - change_s, state_s=now_s - stands_s)
            self._last_edge_s = self._resumed_s = now_s
        self._change_s = self._stands_s = None
        return pause

    def take(self) -> tuple[BatchChoice | None, int, float, float]:
        """Shape, number of steps, and median step and micro-step time since the last call."""
        steps, micros = self._steps, self._micros
        self._steps, self._micros = deque(maxlen=_KEPT), deque(maxlen=_KEPT)
        return (
            self._shape,
            len(steps),
            statistics.median(steps) if steps else 0.0,
            statistics.median(micros) if micros else 0.0,
        )

    def _restart(self, shape: BatchChoice | None) -> None:
        self._shape, self._skip, self.batch_size = shape, _WARM_UP, 0
        self._steps, self._micros = deque(maxlen=_KEPT), deque(maxlen=_KEPT)
