"""Where a training run stands, as plain values that travel to joiners and into checkpoints (pure)."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from placement.cluster.progress import Progress


@dataclasses.dataclass(slots=True)
class LoopProgress:
    """One pass of a loader within an epoch: samples consumed so far, and whether it has ended."""

    position: int = 0
    done: bool = False


_MOST_ENDS = 128
"""Ends of epochs that are remembered: they travel with every heartbeat, and a run may have a million epochs."""


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
        done: statistical progress of the committed steps, the sum of their gains: scale-invariant iterations, each
            worth one step at the initial batch.
        epoch_ends: ``done`` at the end of every ``stride``-th epoch.
        stride: 1; doubled whenever there would be too many ends.
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
    done: float = 0.0
    epoch_ends: list[float] = dataclasses.field(default_factory=list)
    stride: int = 1

    def end_epoch(self) -> None:
        """The epoch in progress is over."""
        self.epoch += 1
        self.loops.clear()
        if self.epoch % self.stride == 0:
            self.epoch_ends.append(self.done)
        if len(self.epoch_ends) > _MOST_ENDS:
            self.epoch_ends, self.stride = self.epoch_ends[1::2], 2 * self.stride

    def after(self, ordinal: int, count: int, gain: float) -> RunProgress:
        """A copy that counts the step in progress as done.

        Args:
            ordinal: loader passes of the epoch that had begun when the step did.
            count: samples of the step.
            gain: its statistical progress.
        """
        done = copy.deepcopy(self)
        done.loops = done.loops[:ordinal]
        done.loops[-1].position += count
        done.steps += 1
        done.done += gain
        return done

    def told(self) -> Progress:
        """What the allocator hears of it, with ``stride`` epochs counted as one."""
        epochs = None if not self.epochs else self.epochs / self.stride
        return Progress(done=self.done, epoch_ends=tuple(self.epoch_ends), epochs=epochs, stride=self.stride)

    def resume_point(self) -> dict[str, Any]:
        """Epoch and loader positions as JSON values, to stand beside a checkpoint.

        A checkpoint taken when every loader pass of the epoch has ended resumes at the next epoch.
        """
        point = self
        if self.loops and all(loop.done for loop in self.loops):
            point = copy.deepcopy(self)
            point.end_epoch()
        return {
            "epoch": point.epoch,
            "epochs": point.epochs,
            "loops": [[loop.position, loop.done] for loop in point.loops],
            "steps": point.steps,
            "reports": point.reports,
            "done": point.done,
            "epoch_ends": list(point.epoch_ends),
            "stride": point.stride,
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
            epochs=point.get("epochs"),
            done=float(point.get("done", 0.0)),
            epoch_ends=[float(end) for end in point.get("epoch_ends", ())],
            stride=int(point.get("stride", 1)),
        )


def check_resume_point(point: Any) -> None:
    """Raise unless a run can go on from there; an empty one says nothing, and none is wrong about it.

    Raises:
        ValueError: a field is missing or wrong; the message names it.
    """
    if not isinstance(point, Mapping):
        raise ValueError(f"where it stands must be an object, but is {point!r}")
    if not point:
        return
    for name in ("epoch", "epochs", "steps", "reports", "left", "stride"):
        value = point.get(name, None if name == "epochs" else 1 if name == "stride" else 0)
        if name == "epoch" and name not in point:
            raise ValueError("it has no 'epoch'")
        if value is None and name == "epochs":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < (name == "stride"):
            raise ValueError(f"{name} must be a whole number from {int(name == 'stride')}, but is {value!r}")
    try:
        told = RunProgress.from_resume_point(dict(point))
        for loop in told.loops:
            if isinstance(loop.position, bool) or not isinstance(loop.position, int) or loop.position < 0:
                raise ValueError(f"a loader's position must be a whole number from 0, but is {loop.position!r}")
        if not all(math.isfinite(value) for value in (told.done, *told.epoch_ends)):
            raise ValueError(f"statistical progress must be finite, but is {told.done!r}, {told.epoch_ends!r}")
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"it is no place in a run: {error}") from None
