"""SHELL: actor class of worker processes, which a controller can import without torch.

A controller only starts workers. Importing torch, as :mod:`elastic_ray.worker.worker` does, would cost it two
seconds of CPU time.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_ray.membership.messages import ControllerMessage
from elastic_ray.worker.messages import RunResult
from elastic_ray.worker.setup import Assignment, ProcessInfo, ProcessOwner, WorkerSetup
from placement.versions import Spoken, check_spoken

if TYPE_CHECKING:
    from elastic_ray.worker.ownership import Ownership
    from elastic_ray.worker.worker import Worker


class WorkerProcess:
    """Actor class of worker processes, whose methods delegate to :class:`elastic_ray.worker.worker.Worker`.

    The process warms up when it starts, and may wait in the cluster's pool until a job or sweep claims it for good.

    Args:
        owner: Owner of the process; None for a process in the pool.
    """

    def __init__(self, owner: ProcessOwner | None, theirs: Spoken) -> None:
        check_spoken(theirs, "a job's controller", "its worker process")
        from elastic_ray.worker.ownership import Ownership
        from elastic_ray.worker.warm_up import warm_up

        self._lock = threading.Lock()
        self._ownership: Ownership = Ownership(owner)
        self._worker: Worker | None = None
        warm_up()

    def memory_bytes(self) -> int | None:
        """Return the process's resident memory [bytes] to the pool, as a sign of life; None once it is claimed."""
        from elastic_ray.worker.warm_up import resident_bytes

        return resident_bytes() if self._ownership.wanted() else None

    def claim(self, owner: ProcessOwner) -> bool:
        """Assign the process to this owner for good; return False if it already belongs to a different owner."""
        with self._lock:
            return self._ownership.claim(owner)

    def leave(self, holder: str) -> None:
        """Exit the process, unless it belongs to a holder (job or sweep) other than ``holder``."""
        self._ownership.leave(holder)

    def prepare(self, setup: WorkerSetup) -> ProcessInfo:
        """Create the job's worker as ``setup`` describes, unless it exists; return facts about the process."""
        from elastic_ray.worker.worker import Worker

        with self._lock:
            self._ownership.prepared()
            if self._worker is None:
                self._worker = worker = Worker(setup)
                self._ownership.saves = lambda: worker.saves_alone
        return self._worker.prepare()

    def run(self, assignment: Assignment) -> None:
        """Run the train function as ``assignment`` says, until it ends; :meth:`outcome` returns the result."""
        assert self._worker is not None, "a process is prepared before it runs anything"
        self._worker.run(assignment)

    def outcome(self, token: str, worker: str, wait_s: float) -> RunResult | None:
        """Wait up to ``wait_s`` [s] for this run to end; return its result, or None if it is still in progress."""
        assert self._worker is not None, "a process is prepared before it runs anything"
        return self._worker.outcome(token, worker, wait_s)

    def post(self, token: str, worker: str, message: ControllerMessage) -> None:
        """Deliver a message from the controller to the run with this token."""
        if self._worker is not None:
            self._worker.post(token, worker, message)

    def sees_running(self, pid: int) -> bool:
        """True if the process with this id on the same node is running; see :func:`is_running`."""
        return is_running(pid)


def is_running(pid: int) -> bool:
    """True if a local process exists and is neither stopped nor a zombie; always True without ``/proc``."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()
    return state not in "TtZX"
