"""Where a training run stands, as plain values that travel to joiners and into checkpoints (pure)."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(slots=True)
class LoopProgress:
    """One pass of a loader within an epoch: samples consumed so far, and whether it has ended."""

    position: int = 0
    done: bool = False


@dataclasses.dataclass(slots=True)
class RunProgress:
    """Everything but tensors that a rank must share with the others.

    Attributes:
        epoch: epoch in progress, from 0.
        epochs: declared number of epochs, None before it is known.
        loops: the loader passes of this epoch in the order the user's code started them.
        ticks: committed edges (steps of any loader) since the start; orders the states of ranks.
        steps: committed optimizer steps of the training loader.
        lineage: generation in which the last edge was committed.
        passes: loader passes that ended, counted when all ranks agreed on the end.
        slot: optimizers stepped within the step in progress.
        sums: what accumulators hold, by accumulator and name.
        reports: calls of ``report`` that the run has made.
    """

    epoch: int = 0
    epochs: int | None = None
    loops: list[LoopProgress] = dataclasses.field(default_factory=list)
    ticks: int = 0
    steps: int = 0
    lineage: int = 0
    passes: int = 0
    slot: int = 0
    sums: dict[tuple[int, int], dict[str, float]] = dataclasses.field(default_factory=dict)
    reports: int = 0

    def resume_point(self) -> dict[str, Any]:
        """Epoch and loader positions as JSON values, to stand beside a checkpoint.

        A checkpoint taken when every loader pass of the epoch has ended resumes at the next epoch.
        """
        finished = bool(self.loops) and all(loop.done for loop in self.loops)
        loops = [] if finished else [[loop.position, loop.done] for loop in self.loops]
        return {
            "epoch": self.epoch + int(finished),
            "loops": loops,
            "steps": self.steps,
            "reports": self.reports,
        }

    @classmethod
    def from_resume_point(cls, point: dict[str, Any]) -> RunProgress:
        """The inverse of :meth:`resume_point`."""
        loops = [LoopProgress(position, done) for position, done in point.get("loops", [])]
        return cls(
            epoch=int(point["epoch"]),
            loops=loops,
            steps=int(point.get("steps", 0)),
            reports=int(point.get("reports", 0)),
        )


def agreed_lead(sum_of_leads: float, sum_of_squares: float, world_size: int) -> int:
    """Whether all ranks have prepared the same next generation, from two sums over the ranks.

    Each rank contributes d, how many generations ahead of the present one its prepared group is (0 for none), and
    d squared. All d are equal exactly when ``world_size`` x sum(d^2) = sum(d)^2 (Cauchy-Schwarz), whoever asks.

    Returns:
        The common d, 0 where the ranks do not agree (yet).
    """
    total, squares = round(sum_of_leads), round(sum_of_squares)
    return total // world_size if total > 0 and world_size * squares == total * total else 0


def names_ballot(names: Sequence[tuple[tuple[int, int], str]]) -> list[float]:
    """A digest d of the sums that a rank adds to, and d squared; both exact in float64, also added up."""
    digest = zlib.crc32(repr(list(names)).encode()) & 0xFFFFF
    return [float(digest), float(digest * digest)]


def names_agree(sums: Sequence[float], world_size: int) -> bool:
    """Whether all ranks have the same digest, from the sums of their ballots (see :func:`agreed_lead`)."""
    return world_size * round(sums[1]) == round(sums[0]) ** 2
