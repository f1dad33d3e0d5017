"""Round of steps that each rank makes by itself, and that all commit together (pure)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from elastic_ray.state.progress import BITS, PassProgress
from elastic_ray.steps.step import LoaderStep


@dataclasses.dataclass(slots=True)
class StepRound:
    """Round in progress: the steps up to the next average of models.

    Attributes:
        loader_pass: the pass that it is in.
        position: samples of the pass that were used before it.
        loader_steps: committed steps before it.
        counts: samples of each of its steps; none where they are not known.
        left: own steps to come.
        steps: own steps that have ended.
        trained: whether a step has trained.
        last: the latest own step; None before the first.
    """

    loader_pass: PassProgress
    position: int
    loader_steps: int
    counts: Sequence[int]
    left: int
    steps: int = 0
    trained: bool = False
    last: LoaderStep | None = None
    _sum: int | None = 0  # of the hashes of this rank's samples

    def add(self, step: LoaderStep, hashes: int | None, *, trained: bool) -> None:
        """Add a step that has ended on this rank, with the hashes of its own samples; None for unknown."""
        if not step.taken:
            self.left, self.steps, self.last = self.left - 1, self.steps + 1, step
        self.trained = self.trained or trained
        self._sum = None if self._sum is None or hashes is None else (self._sum + hashes) & BITS

    def leave(self) -> None:
        """Leave the steps that are to come."""
        self.left, self.steps, self._sum = 0, len(self.counts), None

    @property
    def samples(self) -> int:
        """Samples of its steps so far, of all ranks."""
        return self.loader_pass.position - self.position

    @property
    def hashed(self) -> Callable[[], int] | None:
        """Function that returns the sum of the hashes of this rank's samples in the round; None for unknown."""
        return None if self._sum is None else functools.partial(int, self._sum)
