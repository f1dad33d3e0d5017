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
        self._checkpoint = checkpoint
        self._epoch = epoch
        self._others_at = others_at
        self._has_state = has_state
        self._taken = False

    def take_checkpoint(self) -> Any:
        """The checkpoint, for code that asks for it: it continues after it."""
        self._taken = True
        return self._checkpoint

    def first_epoch(self) -> int:
        """Epoch that the code begins with which counts epochs by itself.

        Raises:
            RuntimeError: there is a checkpoint, and nothing else to continue from, but the code has not asked for it.
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
        """Epochs that such code has to go by before it is where the others are, as far as that is known."""
        return max(0, (self._others_at or 0) - self.first_epoch())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Captured states that a worker begins with, and that make it a holder of state.

    Attributes:
        states: from before a rerun in this process, or of an automatic checkpoint.
        path: of that automatic checkpoint; empty for a rerun.
    """

    states: dict[str, Any]
    path: str = ""
