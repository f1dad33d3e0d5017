"""Steps of a loader pass: samples for each rank, and step times measured with the monotonic clock."""

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
    """Current step of one loader pass.

    Attributes:
        sizes: ``sizes[rank][micro]`` is the number of samples in one micro-batch on one rank.
        scale: Global / initial batch size, by the loader's setting (a short last step does not change it).
        init_batch_size: Global batch size that the user's learning rate was chosen for.
        shape: Division of the loader's full steps on each rank.
        ordinal: Number of the epoch's loader passes that had started when the step started.
        can_switch: Returns True if a group of a given size may start after the step.
        leads: Whether the loader is the job's training loader, whose steps count as the job's steps.
        whole: Each rank has one whole batch, for evaluation. In a pass's last step, some ranks may have none.
        sample_tag: Digest of the samples that all ranks read identically for the step; 0 without such samples.
        hashed: Returns the sum of this rank's index hashes, once its batches are fetched. None if the loader does not
            know indices.
        population: Number of samples that the pass draws from without replacement; None if unknown.
        own_counts, counts: Weights that the loop gives to micro-batches: on this rank, and on all ranks once known.
        count: Number of samples in the whole step.
        micro_steps: Number of micro-batches per rank in the step.
        is_last_micro: Whether gradients are synchronised in the current micro-step.
        weighed: Whether the loop sets the weights of this rank's micro-batches.
        to_come: Returns the number of samples in each of the pass's steps from this one on, up to the given number of
            steps. None if unknown.
        taken: The step belongs to a slow rank, and this rank executes it in addition to its own.
        given: The step belongs to this rank, and another rank executes it.
        loader_steps: Number of steps committed before this one, if it is not nested in another.
        updates_before: Number of updates that user code had requested in the surrounding step when this one started.
        reports_before: Number of reports that the run had made when the step started.
        sums_before: Accumulators' sums before the first step nested in this one; None without nested steps.
        made_at: Number of accumulators that the step has made, keyed by place in the code.
        halved: Whether the step has more micro-batches than its shape, to measure the gradient's noise.
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
    loader_steps: int = 0
    updates_before: int = 0
    reports_before: int = 0
    sums_before: dict[tuple[int, int], dict[str, float]] | None = None
    made_at: dict[str, int] = dataclasses.field(default_factory=dict)
    own_counts: list[float] = dataclasses.field(default_factory=list)
    counts: Sequence[Sequence[float]] | None = None
    backward: int = -1  # the latest micro-batch that had a backward pass
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
        """Mark this rank's part of the step as given to another rank, which executes it."""
        self.given, self.hashed = True, None if self.hashed is None else int

    def start_micro(self, micro: int) -> None:
        """Start micro-step number ``micro`` of the step, before its micro-batch is handed out."""
        self.micro, self.is_last_micro = micro, micro == self.micro_steps - 1

    def weigh(self, count: float) -> None:
        """Set the current micro-batch's weight in the step's mean gradient, instead of its number of samples.

        Raises RuntimeError if the micro-batch already has a weight or a gradient, or if an earlier one in the step has
        no weight.
        """
        if self.backward == self.micro:
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

    @property
    def work(self) -> Sequence[Sequence[float]]:
        """``work[rank][micro]`` is the weight set by the loop, if known for all ranks, else the number of samples."""
        return self.counts if self.counts is not None and len(self.counts) == len(self.sizes) else self.sizes

    @property
    def counted(self) -> float | None:
        """Sum of the weights that the loop has set on all ranks; None until the ranks have exchanged them."""
        if len(self.sizes) == 1:
            return sum(self.own_counts)
        known = self.counts is not None and len(self.counts) == len(self.sizes)
        return sum(map(sum, self.counts)) if known and self.counts is not None else None

    @property
    def sample_scale(self) -> float:
        """Number of samples in this step / initial batch size."""
        return self.count / self.init_batch_size

    @property
    def equal_bsz(self) -> int:
        """Number of samples in the largest micro-batch if all ranks had the same number of samples."""
        return -(-self.count // (len(self.sizes) * self.micro_steps))

    @property
    def samples_left(self) -> int:
        """Number of unused samples in the pass, including this step's samples."""
        return self.total - self.loader_pass.position

    @property
    def leaves_ranks_idle(self) -> bool:
        """True if the last ranks have no samples in this step."""
        return not self.sizes[-1][0]

    def is_idle(self, rank: int) -> bool:
        """True if a rank has no samples in this step."""
        return not self.sizes[rank][0]

    def weight(self, rank: int) -> float:
        """Return the weight of a rank's current micro-batch in the step's mean gradient (by samples, not by ranks).

        If the loop sets weights, this rank's value is provisional until :attr:`counts` are known: until then, a unit of
        weight counts like one sample, and the weights of a step's earlier micro-batches are correct up to one common
        factor, ``count / sum of the counts``.
        """
        if not self.own_counts:
            return self.sizes[rank][self.micro] / self.count
        if self.counts is None:
            return self.own_counts[self.micro] / self.count
        return _part(self.counts[rank][self.micro], sum(map(sum, self.counts)))

    def own_weight(self, rank: int) -> float:
        """Return the current micro-batch's fraction of the samples on ``rank``; provisional, as in :meth:`weight`."""
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
    """Clock for step and micro-step times [s], which restarts when the batch shape or the strategy changes."""

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
        """Record the end of one or more committed steps. Times are discarded in the first steps after a restart.

        Args:
            shape: Shape of the batch; None if the steps did not train (evaluation).
            micro_steps: Number of micro-steps per step; steps are not timed if it differs from the number in ``shape``.
            samples: Number of samples in a step.
            strategy: Key of the synchronisation strategy. None while a strategy is being chosen; such steps are not
                timed.
            uneven: Whether the ranks had unequal shares of the samples; such times are kept separate.
            steps: Number of steps committed together; their mean time counts.
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
        """Record the end of a micro-step that does not synchronise gradients."""
        now_s = time.monotonic()
        if self._last_micro_s is not None and not self._skip:
            self._micros.append(now_s - self._last_micro_s)
        self._last_micro_s = now_s

    def change_begins(self) -> None:
        """Record the start of a group change that the ranks have agreed on, or that a failure has caused."""
        self._change_s = time.monotonic() if self._change_s is None else self._change_s

    def group_stands(self) -> None:
        """Record that a new group was formed; called again if groups break before their ranks are identical."""
        self._stands_s = time.monotonic()

    def resume(self, generation: int) -> Pause:
        """Resume in a new generation; return the pause since the last committed step, split by phase.

        All phases are 0 if no step was committed before. Otherwise, they sum to the total pause.
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
        """Return and clear (batch shape, number of steps, median step time [s], median micro-step time [s])."""
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
