"""How far a worker that joins within an epoch runs the code only to catch up (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_ray.state.progress import RunProgress

if TYPE_CHECKING:
    from elastic_ray.state.shared_state import SharedState


class Replay:
    """What the code does up to where the others are has had its effect on the state that this worker has got.

    Args:
        state: it, fresh.
        between_epochs: the code comes by passes of earlier epochs first.
    """

    def __init__(self, state: SharedState, *, between_epochs: bool = False) -> None:
        progress = state.progress
        state.snapshot()
        self._state = state
        self._ordinal = len(progress.passes) - 1
        self._collective = progress.joined_at
        self._effects = progress.effects()
        self._before_pass = between_epochs or bool(progress.passes)

    @staticmethod
    def needed(progress: RunProgress) -> bool:
        """Whether the others are within an epoch's code."""
        return bool(progress.passes) or progress.joined_at is not None

    @property
    def before_pass(self) -> bool:
        """Whether the others' latest pass is still to come; else the code runs up to the collective they are in."""
        return self._before_pass

    def reach_pass(self, ordinal: int) -> bool:
        """The code comes to the epoch's pass of this number; whether it has caught up."""
        if ordinal < self._ordinal:
            return False
        self._before_pass = False
        self._take_back()
        return self._collective is None

    def reach_collective(self, number: int) -> bool:
        """The code comes to its collective of this number; whether it has caught up."""
        if self._before_pass or self._collective is None or number < self._collective:
            return False
        self._take_back()
        return True

    def _take_back(self) -> None:
        self._state.roll_back()
        self._state.progress.restore_effects(self._effects)
