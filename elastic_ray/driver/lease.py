"""SHELL: a driver thread that keeps a job's lease, and collects the results when the job ends."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from elastic_ray.events import JobEvent, JobOutcome, JobPhase, JobStatus
from placement.text import one_line

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
START_TIMEOUT_S = 180.0  # the first answer waits for the controller's process, on a busy machine for long
_RENEWALS_PER_LEASE = 5
_WATCHED_INTERVAL_S = 0.1
_COLLECT_TIMEOUT_S = 60.0  # a result may hold a large return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """Final information that the driver keeps about a job that has ended."""

    status: JobStatus
    events: tuple[JobEvent, ...] = ()  # everything that happened to it
    outcome: JobOutcome | None = None  # how it ended; None if its controller was lost before it could say
    before: JobStatus | None = None  # the last status that a lost controller gave; None if it was not lost
    lost: str = ""  # why the controller counts as lost; empty if it does not


class LeaseKeeper:
    """Thread that renews a job's lease; when the job ends, it fetches the results and closes the job.

    The lease is the driver's claim on the job, which ends without renewal. The user's loop does not renew it, because
    the loop may block. The thread ends exactly when the driver process does, so the lease proves that the process is
    alive.
    """

    def __init__(self, job: str, controller: Any, *, lease_s: float, away_s: float) -> None:
        """Start renewing a lease of ``lease_s`` [s]; after ``away_s`` [s] without an answer, the job counts as lost."""
        self._away_s, self._job, self._controller, self._lease_s = away_s, job, controller, lease_s
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._watchers = 0
        self.ending: EndedJob | None = None  # final state of the job
        self._collected: EndedJob | None = None
        self.answered = False  # whether the controller has started
        self._away_since_s: float | None = None
        self.last = JobStatus(job=job, phase=JobPhase.WAITING)
        self._thread = threading.Thread(target=self._run, name=f"elastic_ray-lease-{job}", daemon=True)
        self._thread.start()
        # Runs before Ray's own exit handler, so that the thread never talks to a Ray that is going down.
        atexit.register(self.leave)

    def wait(self, timeout_s: float | None) -> EndedJob | None:
        """Wait for the job to end, up to ``timeout_s`` [s] (None: forever); return None if it has not ended by then."""
        with self._watched():
            self._ended.wait(timeout_s)
        return self.ending

    def answer(self, status: JobStatus) -> None:
        """Store a status received from the controller as the job's latest."""
        self.last = status

    def poll(self) -> None:
        """Renew the lease immediately, because the job's status may have changed."""
        self._wake.set()

    def leave(self) -> None:
        """Stop renewing the lease: the job ends when its lease runs out, unless another process attaches."""
        self._leaving.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)
        atexit.unregister(self.leave)

    def lost(self, error: BaseException) -> None:
        """Record that the controller is gone; the job counts as failed unless its results have already been fetched."""
        if self._collected is not None:  # it has closed because everything was fetched
            self._end(self._collected)
            return
        message = "its controller is gone"
        status = dataclasses.replace(self.last, phase=JobPhase.FAILED, workers=0, message=message)
        self._end(EndedJob(status=status, before=self.last, lost=one_line(error)))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Poll more often while a caller is waiting for the job to end."""
        with self._lock:
            self._watchers += 1
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._watchers -= 1

    def _run(self) -> None:
        """Renew until the job has ended or this process leaves it."""
        while not self._leaving.is_set() and self.ending is None:
            # Ray would start a cluster of its own at the next call if the driver has shut it down.
            if not ray.is_initialized():
                self.lost(RuntimeError("this process called ray.shutdown()"))
                return
            self._renew()
            seldom = min(self._lease_s, CALL_TIMEOUT_S) / _RENEWALS_PER_LEASE
            interval = _WATCHED_INTERVAL_S if self._watchers else seldom
            self._wake.wait(interval)
            self._wake.clear()

    def _renew(self) -> None:
        """Renew the lease once, and record the job's status from the answer, or that the job is lost."""
        try:
            self.last = ray.get(self._controller.renew_lease.remote(), timeout=min(self._lease_s, CALL_TIMEOUT_S))
            self.answered = True
            self._away_since_s = None
            if self.last.phase.ended:
                self._collect()
        except GetTimeoutError as error:
            if self.answered:  # else it is still starting
                logger.warning("job %s: its controller has not answered for %g s", self._job, CALL_TIMEOUT_S)
                self._away(error)
        except ActorUnavailableError as error:
            self._away(error)
        except RayActorError as error:
            self.lost(error)
        except Exception as error:
            if self._leaving.is_set() or not ray.is_initialized():
                self.lost(RuntimeError("this process disconnected from Ray"))
            else:
                logger.warning("job %s: renewing its lease failed: %r", self._job, error)

    def _away(self, error: BaseException) -> None:
        """Record that the controller does not answer; Ray usually restarts it, while the job continues."""
        now_s = time.monotonic()
        if self._away_since_s is None:
            self._away_since_s = now_s
            logger.info("job %s: its controller does not answer; it may be restarted now", self._job)
        elif now_s - self._away_since_s > self._away_s:
            self.lost(error)

    def _collect(self) -> None:
        """Fetch the results of a job that has ended, and close its controller."""
        controller = self._controller
        wanted = [controller.outcome.remote(), controller.events.remote(), controller.status.remote()]
        outcome, events, status = ray.get(wanted, timeout=_COLLECT_TIMEOUT_S)
        if outcome is None:  # the phase runs ahead of the outcome: look again
            return
        self._collected = EndedJob(status=status, events=tuple(events), outcome=outcome)
        controller.close.remote()
        self._end(self._collected)

    def _end(self, ending: EndedJob) -> None:
        """Store the job's final state; only the first call has an effect."""
        with self._lock:
            if self.ending is not None:
                return
            self.ending = ending
        self.last = ending.status
        self._ended.set()
        self._wake.set()
        with suppress(Exception):
            atexit.unregister(self.leave)
