"""SHELL: a worker's process as its controller knows it: the actor class, without what the process itself imports.

A controller only starts workers; torch, which :mod:`elastic_ray.job.worker` needs, costs it two seconds of CPU.
"""

from __future__ import annotations

from pathlib import Path

from elastic_ray.job.messages import Assignment, ProcessFacts, RunResult, WorkerSetup
from elastic_ray.membership.plan import Message


class WorkerProcess:
    """Actor class; see :class:`elastic_ray.job.worker.Worker`, which its methods call."""

    def __init__(self, setup: WorkerSetup) -> None:
        from elastic_ray.job.worker import Worker

        self._worker = Worker(setup)

    def prepare(self) -> ProcessFacts:
        """Do what the first step would otherwise wait for."""
        return self._worker.prepare()

    def run(self, assignment: Assignment) -> None:
        """Run the train function to its end, which :meth:`outcome` tells."""
        self._worker.run(assignment)

    def outcome(self, token: str, worker: str, wait_s: float) -> RunResult | None:
        """How a run has ended; None if it has not within ``wait_s``."""
        return self._worker.outcome(token, worker, wait_s)

    def post(self, token: str, worker: str, message: Message) -> None:
        """A message of the controller to one run."""
        self._worker.post(token, worker, message)

    def sees_running(self, pid: int) -> bool:
        """Whether a process of this node is there and neither stopped nor a zombie; True where nobody can tell."""
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return not Path("/proc/self/stat").exists()
        return state not in "TtZX"
