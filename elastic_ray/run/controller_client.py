"""Protocol between a session and its job's controller, or the controller's substitute in a standalone loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.events import Pause
from elastic_ray.state.progress import Link
from elastic_ray.state.resume_point import ResumePoint


class ControllerClient(Protocol):
    """Protocol for a session's calls to its controller; methods return at once unless documented otherwise."""

    paced: bool  # whether ``report`` waits until a sweep's scheduler has decided

    def ready(self, loader: LoaderInfo | None, *, has_state: bool, loaded: int = 0) -> None:
        """Report that this worker has built its model and is waiting for its first generation.

        Args:
            loaded: Step count of the automatic checkpoint that this worker has loaded; 0 if it has loaded none.
        """

    def failed(self, generation: int, cause: str) -> None:
        """Report that a collective of ``generation`` failed with ``cause``; this worker is waiting for the next one."""

    def switched(self, generation: int, pause: Pause, proof: Link) -> None:
        """Report that this worker is training in ``generation`` after a ``pause``; ``proof`` contains a state hash."""

    def report_soon(self) -> None:
        """Request that rank 0's next step report be sent early, because that report contains urgent news."""

    def report(self, metrics: Mapping[str, Any], checkpoint: Any, resume_point: ResumePoint, index: int) -> None:
        """Make rank 0's report ``index``: metrics and, unless None, a checkpoint; block until its files are copied."""

    def report_missed(self, metrics: Mapping[str, Any], resume_point: ResumePoint, index: int) -> None:
        """Make report ``index`` if the rank 0 of that time was lost before it made it."""

    def add_files(self, checkpoint: Any, index: int) -> None:
        """Add another rank's files to the checkpoint in rank 0's report ``index``; block until they are copied."""

    def notify(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        """Report an event to the job's user: its kind, a sentence (``text``), and further values (``detail``)."""

    def tracker_dir(self) -> str:
        """Return a directory on this node for the train function's logs, the same for every rank 0 of the run."""

    def claim_fault(self, index: int) -> bool:
        """Return True if this process may inject fault ``index`` from the test's fault script."""
