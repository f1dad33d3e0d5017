"""Protocol of a job's controller as a session uses it, also for what replaces it in a standalone loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.events import Pause
from elastic_ray.state.progress import Link
from elastic_ray.state.resume_point import ResumePoint


class ControllerClient(Protocol):
    """Protocol of a training session's calls to its controller. All return at once unless they say otherwise."""

    paced: bool  # whether ``report`` waits until a sweep's scheduler has decided

    def ready(self, loader: LoaderInfo | None, *, has_state: bool, loaded: int = 0) -> None:
        """Report that this worker has built its model and waits for its first generation.

        Args:
            loader: the training loader's limits, if it has one.
            has_state: it has kept a trained state in memory.
            loaded: steps of the automatic checkpoint that it has loaded instead; 0 without one.
        """

    def failed(self, generation: int, cause: str) -> None:
        """Report a failed collective of ``generation``; this worker waits for the next generation."""

    def switched(self, generation: int, pause: Pause, proof: Link) -> None:
        """Report that this worker trains in ``generation`` now, with the pause and the proof of its state."""

    def report_soon(self) -> None:
        """Rank 0's account of its steps holds something that is not to wait for the next regular one."""

    def report(self, metrics: Mapping[str, Any], checkpoint: Any, resume_point: ResumePoint, index: int) -> None:
        """Rank 0's metrics and checkpoint; blocks until the checkpoint's files have been taken over."""

    def add_files(self, checkpoint: Any, index: int) -> None:
        """Files of another rank for the checkpoint that rank 0 reports under this number; blocks until it has them."""

    def tell(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        """Report an event to the job's user: its kind, a sentence, and numbers."""

    def tracker_dir(self) -> str:
        """Return a directory of this node that the train function may log into; the same run's, whoever is rank 0."""

    def claim_fault(self, index: int) -> bool:
        """Return whether this process may carry out fault ``index`` of the script."""
