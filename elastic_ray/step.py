"""One step of a loader pass: who takes how many samples (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.run_progress import LoopProgress


@dataclasses.dataclass(slots=True)
class Step:
    """The step in progress of one loader pass.

    Attributes:
        loop: the pass.
        total: samples in the pass.
        sizes: ``sizes[rank][micro]`` samples of each rank's micro-batches.
        scale: global / initial batch size, by the loader's setting (a short last step does not change it).
        shape: how the loader cuts its full steps on each rank.
        ordinal: how many loader passes of the epoch had begun when the step did.
        micro: the micro-step in progress.
    """

    loop: LoopProgress
    total: int
    sizes: Sequence[Sequence[int]]
    scale: float
    shape: BatchChoice
    ordinal: int
    micro: int = 0

    @property
    def count(self) -> int:
        """Samples of the whole step."""
        return sum(sum(sizes) for sizes in self.sizes)

    @property
    def micro_steps(self) -> int:
        """Micro-batches a rank takes in this step."""
        return len(self.sizes[0])

    @property
    def is_last_micro(self) -> bool:
        """Whether gradients are synchronised in this micro-step."""
        return self.micro == self.micro_steps - 1

    def weight(self, rank: int) -> float:
        """Share of a rank's present micro-batch in the step's mean gradient (by samples, not by ranks)."""
        return self.sizes[rank][self.micro] / self.count
