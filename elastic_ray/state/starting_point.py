"""Starting point of a train function's run, and the epoch its code starts with (pure)."""

from __future__ import annotations

import dataclasses
from typing import Any


class StartingPoint:
    """Starting point of a train function's run: its checkpoint, and the epoch that its code starts with.

    Args:
        checkpoint: a reported one that the user's code may load; None at the beginning.
        epoch: the epoch that follows it, by the job's own count; 0 without one.
        others_at: epoch that the other workers are in, as far as that is known; None for one that starts with them.
        has_state: whether the run has a state of its own to continue from, which is later than the checkpoint.
    """

    def __init__(
        self, checkpoint: Any = None, *, epoch: int = 0, others_at: int | None = None, has_state: bool = False
    ) -> None:
        self._checkpoint, self._epoch, self._others_at = checkpoint, epoch, others_at
        self._has_state = has_state
        self._taken = False

    def take_checkpoint(self) -> Any:
        """Return the checkpoint to code that asks for it, and that continues after it."""
        self._taken = True
        return self._checkpoint

    def first_epoch(self) -> int:
        """Return the epoch that code begins with which counts epochs by itself.

        Raises RuntimeError: there is a checkpoint, and nothing else to continue from, but the code has not asked for
        it.
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
        """Number of epochs that the code must skip before it is where the others are, as far as known."""
        return max(0, (self._others_at or 0) - self.first_epoch())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Captured states that a worker starts with, and that make it a holder of state."""

    states: dict[str, Any]  # from before a rerun in this process, or of an automatic checkpoint
    path: str = ""  # of that automatic checkpoint; empty for a rerun
