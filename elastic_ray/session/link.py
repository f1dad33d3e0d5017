"""What a training session needs from outside: the job's controller, or nothing when the loop runs alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from placement.cluster.progress import Progress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a wrapped model tells the job.

    Attributes:
        kind: name of its class.
        details: digest of what decides how long its steps take.
    """

    kind: str
    details: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderInfo:
    """What the training loader, and the models that it feeds, tell the job.

    Attributes:
        limits: what may be done with the batch.
        dataset_size: samples in an epoch, None where unknown.
        sample: what a sample looks like, as text.
        models: the wrapped models, in the loop's order.
    """

    limits: BatchLimits
    dataset_size: int | None = None
    sample: str = ""
    models: tuple[ModelInfo, ...] = ()

    @property
    def max_workers(self) -> int:
        """Most replicas that can each have a sample in every step."""
        limits = self.limits
        batch_size, smallest = (
            (limits.init_batch_size, 1) if limits.fixed else (limits.max_batch_size or 1, limits.lower)
        )
        most = max(1, batch_size // smallest)
        return min(most, self.dataset_size) if self.dataset_size else most


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Rank 0's account of the steps since its last report (times in seconds).

    ``step_time`` and ``grad_time`` are medians over ``steps`` undisturbed steps of one shape; 0 where none was seen.
    ``progress`` is that of the whole run, whatever groups and processes it had.
    """

    generation: int
    nodes: int
    replicas: int
    shape: BatchChoice | None
    steps: int
    step_time: float
    grad_time: float
    noise: tuple[float, float] | None
    epoch: int
    epochs: int | None
    total_steps: int
    batch_size: int
    progress: Progress | None = None


class Link(Protocol):
    """The way out of a training session. All calls return at once unless they say otherwise."""

    def ready(self, loader: LoaderInfo | None, *, has_state: bool, loaded: int = 0) -> None:
        """This worker has built its model and waits for its first generation.

        Args:
            loader: the training loader's limits, if it has one.
            has_state: it has kept a trained state in memory.
            loaded: steps of the automatic checkpoint that it has loaded instead; 0 without one.
        """

    def failed(self, generation: int, cause: str) -> None:
        """A collective of ``generation`` failed here; this worker waits for the next generation."""

    def switched(self, generation: int, pause_s: float) -> None:
        """This worker trains in ``generation`` now."""

    def observe(self, report: StepReport) -> None:
        """Rank 0's measurements."""

    def report(self, metrics: Mapping[str, Any], checkpoint: Any, resume_point: Mapping[str, Any], index: int) -> None:
        """Rank 0's metrics and checkpoint; blocks until the checkpoint's files have been taken over."""

    def tell(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        """What the job's user should know: the kind of event, a sentence, and numbers."""

    def claim_fault(self, index: int) -> bool:
        """Whether this process may carry out fault number ``index`` of the script."""
