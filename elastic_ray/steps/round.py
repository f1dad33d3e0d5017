"""Round of steps that each rank executes independently and that all ranks commit together (pure)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from elastic_ray.state.progress import BITS, PassProgress
from elastic_ray.steps.step import LoaderStep


@dataclasses.dataclass(slots=True)
class StepRound:
    """Round in progress: the local steps from one average of the ranks' models to the next.

    Attributes:
        loader_pass: The pass that the round belongs to.
        position: Number of the pass's samples used before the round.
        loader_steps: Number of steps committed before the round.
        counts: Number of samples in each step of the round; empty if unknown.
        ends_pass: True if the pass ends with the round.
        left: Number of steps that this rank has left.
        steps: Number of steps that this rank has completed.
        trained: True if any step has trained.
        reports_before: Number of reports that the run had made when the round started.
        last: This rank's latest step; None before the first.
        made_at: Number of accumulators that this rank has made in the round, keyed by place in the code.
    """

    loader_pass: PassProgress
    position: int
    loader_steps: int
    counts: Sequence[int]
    left: int
    ends_pass: bool = False
    steps: int = 0
    trained: bool = False
    reports_before: int = 0
    last: LoaderStep | None = None
    made_at: dict[str, int] = dataclasses.field(default_factory=dict)
    _sum: int | None = 0  # of the hashes of this rank's samples

    def add(self, step: LoaderStep, hashes: int | None, *, trained: bool) -> None:
        """Add a step that this rank has completed; ``hashes`` is the sum of its samples' hashes (None: unknown)."""
        if not step.taken:
            self.left, self.steps, self.last = self.left - 1, self.steps + 1, step
        self.trained = self.trained or trained
        self._sum = None if self._sum is None or hashes is None else (self._sum + hashes) & BITS

    def leave(self) -> None:
        """Skip the remaining steps of the round."""
        self.left, self.steps, self._sum = 0, len(self.counts), None

    @property
    def samples(self) -> int:
        """Number of samples used so far in the round, over all ranks."""
        return self.loader_pass.position - self.position

    @property
    def hashed(self) -> Callable[[], int] | None:
        """Function that returns the sum of this rank's sample hashes so far; None if any are unknown."""
        return None if self._sum is None else functools.partial(int, self._sum)
