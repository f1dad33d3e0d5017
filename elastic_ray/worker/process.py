"""SHELL: a worker's process as its controller knows it: the actor class, without what the process itself imports.

A controller only starts workers; torch, which :mod:`elastic_ray.worker.worker` needs, costs it two seconds of CPU.
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
    """Actor class; see :class:`elastic_ray.worker.worker.Worker`, which its methods call.

    It comes to life warm and may wait for a job in the cluster's pool; the first one that claims it has it for good.

    Args:
        owner: for whom it works; None for a process of the pool.
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
        """Sign of life for a pool: its resident memory; None of a process that has a job."""
        from elastic_ray.worker.warm_up import resident_bytes

        return resident_bytes() if self._ownership.wanted() else None

    def claim(self, owner: ProcessOwner) -> bool:
        """Work for this one from now on; False of a process that works for another already."""
        with self._lock:
            return self._ownership.claim(owner)

    def leave(self, holder: str) -> None:
        """End, unless the process works for another than this one."""
        self._ownership.leave(holder)

    def prepare(self, setup: WorkerSetup) -> ProcessInfo:
        """Apply the job's settings, once; later calls only show that the process is well."""
        from elastic_ray.worker.worker import Worker

        with self._lock:
            self._ownership.prepared()
            if self._worker is None:
                self._worker = worker = Worker(setup)
                self._ownership.stay_while(lambda: worker.saves_alone)
        return self._worker.prepare()

    def run(self, assignment: Assignment) -> None:
        """Run the train function to its end, which :meth:`outcome` tells."""
        assert self._worker is not None, "a process is prepared before it runs anything"
        self._worker.run(assignment)

    def outcome(self, token: str, worker: str, wait_s: float) -> RunResult | None:
        """Return how a run has ended; None if it has not within ``wait_s``."""
        assert self._worker is not None, "a process is prepared before it runs anything"
        return self._worker.outcome(token, worker, wait_s)

    def post(self, token: str, worker: str, message: ControllerMessage) -> None:
        """Pass a message of the controller to one run."""
        if self._worker is not None:
            self._worker.post(token, worker, message)

    def sees_running(self, pid: int) -> bool:
        """True if a process of this node runs; see :func:`is_running`."""
        return is_running(pid)


def is_running(pid: int) -> bool:
    """True if a local process exists and is neither stopped nor a zombie, or if that cannot be told."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()
    return state not in "TtZX"
