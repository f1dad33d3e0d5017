"""Rerun of user code until a worker that has joined catches up with the other ranks (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_ray.state.progress import RunProgress

if TYPE_CHECKING:
    from elastic_ray.state.shared_state import SharedState


class Replay:
    """Rerun of user code until this worker catches up with the other ranks; effects on received state are undone.

    Args:
        between_epochs: True if the code must first run through loader passes of earlier epochs.
    """

    def __init__(self, state: SharedState, *, between_epochs: bool = False) -> None:
        progress = state.progress
        state.snapshot()
        self._state = state
        self._ordinal = len(progress.passes) - 1
        self._collective = progress.joined_at
        self._effects = progress.effects()
        self.before_pass = between_epochs or bool(progress.passes)

    @staticmethod
    def needed(progress: RunProgress) -> bool:
        """True if other ranks have started a loader pass or collective in the epoch that this rank must replay."""
        return bool(progress.passes) or progress.joined_at is not None

    def reach_pass(self, ordinal: int) -> bool:
        """Record that the code has reached the epoch's pass ``ordinal``; return True if the replay is complete."""
        if ordinal < self._ordinal:
            return False
        self.before_pass = False
        self._take_back()
        return self._collective is None

    def reach_collective(self, number: int) -> bool:
        """Record that the code has reached collective ``number``; return True if the replay is complete."""
        if self.before_pass or self._collective is None or number < self._collective:
            return False
        self._take_back()
        return True

    def _take_back(self) -> None:
        self._state.roll_back()
        self._state.progress.restore_effects(self._effects)
