"""What the parts of a worker's process need of the run that it carries out."""

from __future__ import annotations

from typing import Any, Protocol

from elastic_ray.batch.reports import StepReport
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.resume_point import ResumePoint


class CapturedStates(Protocol):
    """What all ranks share."""

    def capture_to_save(self) -> dict[str, Any]:
        """All states by name, with what this rank holds for all; tensors are not copied."""

    def capture_part(self, rank: int, world_size: int) -> dict[str, Any]:
        """What this rank writes of them where all ranks do."""


class SavedRun(Protocol):
    """A run whose automatic checkpoints are made."""

    @property
    def job(self) -> str:
        """Name of the job."""

    @property
    def rank(self) -> int:
        """Rank of this worker."""

    @property
    def states(self) -> CapturedStates:
        """What all ranks share."""

    def may_save(self) -> bool:
        """Whether all ranks hold the model that this one does; if they do not, they will after the next step."""

    def resume_point(self) -> ResumePoint:
        """Where a checkpoint that is taken now stands."""

    def tell(self, kind: str, text: str) -> None:
        """Tell the job's user something."""

    def moment(self, name: str) -> None:
        """A named moment of the run, for scripted faults."""


class AnnouncedGroup(Protocol):
    """The present group."""

    @property
    def generation_spec(self) -> GenerationSpec | None:
        """The present generation as announced, None before the first."""


class MeasuredRun(Protocol):
    """A run whose controller hears how it goes."""

    @property
    def group(self) -> AnnouncedGroup:
        """The present group."""

    @property
    def rank(self) -> int:
        """Rank of this worker."""

    @property
    def synced(self) -> bool:
        """Whether the first epoch has begun."""

    @property
    def progress(self) -> RunProgress:
        """Where it stands."""

    def step_report(self) -> StepReport | None:
        """Measurements since the last call."""
