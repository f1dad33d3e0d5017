"""Resume position of a loader's run, with the interface of torch's ``Stateful``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_ray.state.progress import RunProgress
from elastic_ray.state.resume_point import ResumePoint

if TYPE_CHECKING:
    from elastic_ray.session.session import Session

logger = logging.getLogger(__name__)


class ResumableLoader:
    """Base class of a loader that reports its position in a pass and provides state for users' own checkpoints."""

    _session: Session

    @property
    def current_batch_size(self) -> int:
        """Current global batch size [samples]."""
        raise NotImplementedError

    @property
    def drop_last(self) -> bool:
        """True if a pass's last samples are dropped when they are fewer than a batch."""
        raise NotImplementedError

    @property
    def on_last_batch(self) -> bool:
        """True if the current micro-batch is the last of its pass; for a stream, based on the length known so far."""
        step = self._session.ledger.step
        if step is None or step.micro_steps - 1 > step.micro:
            return False
        left = step.samples_left - step.count
        return left < self.current_batch_size if self.drop_last else left <= 0

    @property
    def batches_left(self) -> int | None:
        """Number of this rank's micro-batches left in the pass at the current batch size; None outside a step."""
        step = self._session.ledger.step
        if step is None:
            return None
        left, size = step.samples_left - step.count, self.current_batch_size
        more = left // size if self.drop_last else -(-left // size)
        of_this = step.micro_steps - 1 - step.micro
        return of_this + more * (step.shape.accum_steps + 1) + self._halved_ahead(step.loader_pass.position, more)

    def _halved_ahead(self, position: int, steps: int) -> int:
        """Return how many of the ``steps`` after that at ``position`` are split in two to measure gradient noise."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return the resume point as plain values, for a custom checkpoint.

        The resume point holds the epoch and the number of samples that each of its passes has used. A step whose update
        is in the model counts as done. All ranks and all loaders of a run return the same state, so saving one of them
        is enough.

        Checkpoints passed to ``report`` and automatic checkpoints already include the resume point.
        """
        return self._session.resume_point().to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the position saved by ``state_dict``. Call this before the first epoch, on every worker.

        A job that continues from its own checkpoint ignores the state: its position must match its model.

        Raises:
            ValueError: the state is invalid; the message names the field.
            RuntimeError: training has started.
        """
        resume_at(self._session, state)


def resume_at(run: Session, state: Mapping[str, Any]) -> None:
    """Make a run start from ``state``, which ``state_dict`` of one of its loaders returned; all loaders share it.

    Raises ValueError or RuntimeError like :meth:`ResumableLoader.load_state_dict`.
    """
    point = ResumePoint.from_json(state)
    if point is None:
        raise ValueError("state must come from state_dict(), but is empty")
    if run.synced:
        raise RuntimeError("load_state_dict must be called before the first epoch, but training has begun")
    present = run.states.progress
    if present.steps or present.epoch or present.passes:
        logger.info(
            "the job continues from its own checkpoint, after step %d; a loader's state of step %d is not used",
            present.steps,
            point.steps,
        )
        return
    run.states.start_from(RunProgress.from_resume_point(point))
