"""Resume point of a checkpoint, and the starting point of a train function's run (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


class UnreadableStateError(Exception):
    """Error raised if the state that a run should continue from cannot be read, or is not as it was written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Position of a checkpoint in its run: epoch, samples used in each pass, steps and reports.

    The resume point is written as JSON beside every checkpoint.
    """

    epoch: int  # epoch to continue in, from 0
    epochs: int | None = None  # declared number of epochs, None where it was not known
    # position [samples], and whether it has ended, of each loader pass that the epoch has begun
    passes: tuple[tuple[int, bool], ...] = ()
    steps: int = 0  # optimizer steps that the checkpoint holds
    reports: int = 0  # reports made until then
    done: float = 0.0  # statistical progress, see ``RunProgress``
    epoch_ends: tuple[float, ...] = ()  # ``done`` at the end of every ``stride``-th epoch
    stride: int = 1  # see ``RunProgress``
    # samples left in the pass that it was taken in; no more workers than that can continue from there. 0 where none was
    # in progress.
    samples_left: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the resume point as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, point: Any) -> ResumePoint | None:
        """Parse the JSON values that :meth:`to_json` returned; None for an empty object.

        Raises ValueError if a field is missing or wrong; the message names it.
        """
        if not isinstance(point, Mapping):
            raise ValueError(f"where it stands must be an object, but is {point!r}")
        if not point:
            return None
        if "epoch" not in point:
            raise ValueError("it has no 'epoch'")
        try:
            passes = tuple((_position(position), done) for position, done in point.get("passes", ()))
            done, ends = float(point.get("done", 0.0)), tuple(float(end) for end in point.get("epoch_ends", ()))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"it is not a position in a run: {error}") from None
        if not all(math.isfinite(value) for value in (done, *ends)):
            raise ValueError(f"statistical progress must be finite, but is {done!r}, {list(ends)!r}")
        return cls(
            epoch=_count(point, "epoch"),
            epochs=None if point.get("epochs") is None else _count(point, "epochs"),
            passes=passes,
            steps=_count(point, "steps"),
            reports=_count(point, "reports"),
            done=done,
            epoch_ends=ends,
            stride=_count(point, "stride", least=1),
            samples_left=_count(point, "samples_left"),
        )


def _count(point: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    value = point.get(name, least)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number from {least}, but is {value!r}")
    return value


def _position(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"a loader's position must be a whole number from 0, but is {value!r}")
    return value


class StartingPoint:
    """Starting point of a train function's run: its checkpoint, and the first epoch of its code.

    Args:
        checkpoint: Reported checkpoint that the user's code may load; None at the start of a run.
        epoch: Epoch after the checkpoint, as counted by the job; 0 without a checkpoint.
        others_at: Epoch that the other workers are in, if known; None for a worker that starts with them.
        has_state: Whether the run has its own state to continue from, newer than the checkpoint.
    """

    def __init__(
        self, checkpoint: Any = None, *, epoch: int = 0, others_at: int | None = None, has_state: bool = False
    ) -> None:
        self._checkpoint, self._epoch, self._others_at = checkpoint, epoch, others_at
        self._has_state = has_state
        self._taken = False

    def claim_checkpoint(self) -> Any:
        """Return the checkpoint for user code, which must then continue from it; None at the start of a run."""
        self._taken = True
        return self._checkpoint

    def first_epoch(self) -> int:
        """Return the first epoch to train, for user code that counts epochs itself.

        Raises RuntimeError if the run can continue only from the checkpoint, but user code has not requested it.
        """
        if self._checkpoint is None:
            return 0
        if self._taken:
            return self._epoch
        if self._has_state or self._others_at is not None:
            return 0
        raise RuntimeError(
            f"the job continues from {getattr(self._checkpoint, 'path', self._checkpoint)}, which the train function "
            "has reported, but it has not asked for it: call ray.train.get_checkpoint() before the loop over epochs, "
            "or leave ElasticConfig(automatic_checkpoints=True)"
        )

    @property
    def epochs_behind(self) -> int:
        """Number of epochs that user code must skip to reach the other workers, if their epoch is known; else 0."""
        return max(0, (self._others_at or 0) - self.first_epoch())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Captured states that a worker starts with, from a rerun or an automatic checkpoint."""

    states: dict[str, Any]  # from before a rerun in this process, or of an automatic checkpoint
    path: str = ""  # of that automatic checkpoint; empty for a rerun
