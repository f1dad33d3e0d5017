"""Resume point of a checkpoint: what a job needs to know to continue from there (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


class UnreadableStateError(Exception):
    """A state to continue from cannot be read, or is not what was written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Position of a checkpoint in its run.

    It is written as JSON beside every checkpoint, by the names of the first version.

    Attributes:
        epoch: epoch to continue in, from 0.
        epochs: declared number of epochs, None where it was not known.
        passes: position [samples], and whether it has ended, of each loader pass that the epoch has begun.
        steps: optimizer steps that the checkpoint holds.
        reports: reports made until then.
        done: statistical progress, see ``RunProgress``.
        epoch_ends: ``done`` at the end of every ``stride``-th epoch.
        stride: see ``RunProgress``.
        samples_left: samples left in the pass that it was taken in; no more workers than that can continue from there.
            0 where none was in progress.
    """

    epoch: int
    epochs: int | None = None
    passes: tuple[tuple[int, bool], ...] = ()
    steps: int = 0
    reports: int = 0
    done: float = 0.0
    epoch_ends: tuple[float, ...] = ()
    stride: int = 1
    samples_left: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the resume point as JSON values."""
        return {
            "epoch": self.epoch,
            "epochs": self.epochs,
            "loops": [list(each) for each in self.passes],
            "steps": self.steps,
            "reports": self.reports,
            "done": self.done,
            "epoch_ends": list(self.epoch_ends),
            "stride": self.stride,
            "left": self.samples_left,
        }

    @classmethod
    def from_json(cls, point: Any) -> ResumePoint | None:
        """The inverse of :meth:`to_json`; None for an empty object, which says nothing.

        Raises ValueError: a field is missing or wrong; the message names it.
        """
        if not isinstance(point, Mapping):
            raise ValueError(f"where it stands must be an object, but is {point!r}")
        if not point:
            return None
        if "epoch" not in point:
            raise ValueError("it has no 'epoch'")
        try:
            passes = tuple((_position(position), done) for position, done in point.get("loops", ()))
            done, ends = float(point.get("done", 0.0)), tuple(float(end) for end in point.get("epoch_ends", ()))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"it is no place in a run: {error}") from None
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
            samples_left=_count(point, "left"),
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
