"""Resume position of a loader's run, in the form of torch's ``Stateful``."""

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
    """Base of a loader with the state for users' own checkpoints, and the position in a pass."""

    _session: Session

    @property
    def current_batch_size(self) -> int:
        """Global batch size now [samples]."""
        raise NotImplementedError

    @property
    def drop_last(self) -> bool:
        """True if a tail shorter than a batch is dropped."""
        raise NotImplementedError

    @property
    def on_last_batch(self) -> bool:
        """True if the micro-batch in progress is the last one of its pass, as far as a stream's length is known."""
        step = self._session.passes.step
        if step is None or step.micro_steps - 1 > step.micro:
            return False
        left = step.samples_left - step.count
        return left < self.current_batch_size if self.drop_last else left <= 0

    @property
    def batches_left(self) -> int | None:
        """Micro-batches that follow in the present pass at the present batch size; None between steps, and where an
        iterable dataset's length is not known yet."""
        step = self._session.passes.step
        if step is None:
            return None
        left, size = step.samples_left - step.count, self.current_batch_size
        more = left // size if self.drop_last else -(-left // size)
        of_this = step.micro_steps - 1 - step.micro
        return of_this + more * (step.shape.accum_steps + 1) + self._halved_ahead(step.loader_pass.position, more)

    def _halved_ahead(self, position: int, steps: int) -> int:
        """Return how many of the ``steps`` after the one at ``position`` are cut in two, to measure the noise."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return the resume point as plain values for a checkpoint of your own.

        It holds the epoch, and the samples that each pass of it has used. A step whose update is in the model counts as
        done. It is the same on all ranks, and for all loaders of a run: one of them is enough.

        Checkpoints that are given to ``report``, and automatic ones, have it already.
        """
        return self._session.resume_point().to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start where ``state_dict`` was called; before the first epoch, on every worker alike.

        A job that continues from a checkpoint of its own stays where that stands, which its model does, too.

        Raises:
            ValueError: it is no such state; the message names the field.
            RuntimeError: training has begun.
        """
        resume_at(self._session, state)


def resume_at(run: Session, state: Mapping[str, Any]) -> None:
    """Have a run begin where ``state_dict`` of one of its loaders was called; they all have the same places.

    Raises ValueError, RuntimeError: as :meth:`ResumableLoader.load_state_dict`.
    """
    point = ResumePoint.from_json(state)
    if point is None:
        raise ValueError("state must be what state_dict() has given, but is empty")
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
