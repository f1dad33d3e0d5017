"""SHELL: the driver's handle for a submitted job."""

from __future__ import annotations

import bisect
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.train.v2.api.exceptions import TrainingFailedError
from ray.train.v2.api.result import Result

from elastic_ray.access import join
from elastic_ray.batch.branch_losses import BranchPlan, BranchResult
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.driver.lease import CALL_TIMEOUT_S, START_TIMEOUT_S, LeaseKeeper
from elastic_ray.errors import JobLostError, TrainFunctionError
from elastic_ray.events import EventKind, JobEvent, JobOutcome, JobPhase, JobStatus, Report, WorkerInfo
from elastic_ray.job_spec import JobSpec
from elastic_ray.sealed import Raised, Sealed
from placement.checks import check_number, check_whole
from placement.ray_cluster.named_actors import ALLOCATOR, call_within, find_actor
from placement.storage.storage_calls import call_storage
from placement.text import printable

if TYPE_CHECKING:
    from placement.allocator.explaining import Explanation

logger = logging.getLogger(__name__)


def make_result(outcome: JobOutcome, storage: RunStorage, *, timeout_s: float = 60.0) -> Result:
    """Return Ray Train's ``Result`` for a job that has ended.

    ``metrics`` are the last reported metrics, with or without a checkpoint. ``checkpoint`` is the newest reported
    checkpoint. If the job reported none, it is the directory of the automatic checkpoints, for ``load_model_state``.
    ``best_checkpoints`` are all reported checkpoints that were kept, oldest first. ``metrics_dataframe`` has a row for
    every report. Reports that the outcome no longer holds are read from storage, within ``timeout_s`` seconds.
    """
    import pandas as pd
    from ray.train import Checkpoint

    kept: list[tuple[Checkpoint, dict[str, Any]]] = [
        (Checkpoint(path, storage.filesystem), dict(metrics)) for path, metrics in outcome.checkpoints
    ]
    automatic = Checkpoint(outcome.states, storage.filesystem) if outcome.states else None
    error = outcome.error
    if isinstance(error, Raised):
        error = TrainFunctionError.of(error)
    elif error is not None and not isinstance(error, TrainingFailedError):
        cause, error = error, TrainingFailedError(f"{type(error).__name__}: {error}")
        error.__cause__ = cause
    rows = [dict(report.metrics) for report in all_reports(outcome, storage, timeout_s=timeout_s)]
    return Result(
        metrics=dict(outcome.metrics),
        checkpoint=kept[-1][0] if kept else automatic,
        error=error,
        path=storage.path,
        metrics_dataframe=pd.DataFrame(rows) if rows else None,
        best_checkpoints=kept,
        return_value=_opened(outcome.return_value),
        _storage_filesystem=storage.filesystem,
    )


def _opened(value: Sealed | None) -> Any:
    try:
        return value.open() if value is not None else None
    except Exception as error:  # the job has its result all the same
        logger.warning("what the train function returned cannot be unpickled in this process: %r", error)
        return None


def all_reports(outcome: JobOutcome, storage: RunStorage, *, timeout_s: float) -> list[Report]:
    """Return all reports of an ended job, oldest first: the last ones from its outcome, earlier ones from storage."""
    last = outcome.reports[0].index - 1 if outcome.reports else 0
    if last < outcome.first_report:
        return list(outcome.reports)
    try:
        before = call_storage(
            storage.where,
            "reading reports",
            lambda: storage.read_reports(outcome.first_report, last),
            timeout_s=timeout_s,
        )
    except Exception as error:  # the job has its result all the same
        before = {}
        why = str(error)
    else:
        why = "they are not in the file"
    missing = last - outcome.first_report + 1 - len(before)
    if missing:
        logger.warning("%d of %d reports before number %d cannot be had: %s", missing, last, last + 1, why)
    return [*before.values(), *outcome.reports]


_BRANCH_POLL_S = 0.5
_LONGEST_ASK_S = 5.0  # of one call, below its time-out


def find_controller(job: str) -> Any | None:
    """Return the actor handle of a job's controller; None if no such job exists."""
    return find_actor(f"job:{job}")


class JobHandle:
    """Handle for a submitted job, for querying it, fixing its size, waiting for it and stopping it.

    As long as the process that holds the handle is alive, a thread renews the job's lease. Without renewal, the job
    ends after ``ElasticConfig.lease_s``, unless another process attaches in time. All methods are thread-safe. Methods
    that call the controller raise TimeoutError if it does not respond. After the job has ended, methods return stored
    results.
    """

    def __init__(self, controller: Any, spec: JobSpec) -> None:
        """Claim the lease; called by ``ElasticTrainer.submit`` and :meth:`attach`."""
        self._controller, self._spec = controller, spec
        self._reports: tuple[Report, ...] | None = None  # of a job that has ended with more than its outcome holds
        self._lease = LeaseKeeper(
            spec.job, controller, lease_s=spec.elastic.lease_s, away_s=spec.elastic.controller_timeout_s
        )

    @classmethod
    def attach(cls, job: str) -> JobHandle:
        """Return a handle for a running job that another process submitted, for example after a driver restart.

        Args:
            job: The job's name (``RunConfig.name`` or ``JobHandle.job``).

        Raises:
            ValueError: If no such job is running.
            ConnectionError: If the cluster named by RAY_ADDRESS or `ray start` does not respond.
            AccessRefusedError: If the cluster requires a token, and this process has none or a wrong one.
        """
        join()
        controller = find_controller(job)
        if controller is None:
            raise ValueError(
                f"there is no job {job!r} to attach to: it has ended, or its lease ran out; submit it again "
                "under the same name to continue from its last checkpoint"
            )
        try:
            spec: JobSpec = call_within(START_TIMEOUT_S, controller.spec.remote)
        except RayActorError as error:
            raise ValueError(f"job {job!r} ended while it was being attached to: {error}") from error
        return cls(controller, spec)

    def __repr__(self) -> str:
        status = self._lease.last
        return f"JobHandle({self.job!r}, {status.phase.value}, workers={status.workers})"

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._spec.job

    def done(self) -> bool:
        """True if the job has ended, successfully or not; never blocks."""
        return self._lease.ending is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the job to end, at most ``timeout`` seconds (None: forever); return True if it has ended."""
        return self._lease.wait(timeout) is not None

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the job to end and return its result; a stopped job also returns a result, without an error.

        Args:
            timeout: Maximum wait [s]; None waits forever.

        Raises:
            TimeoutError: If the job has not ended within ``timeout``; it continues.
            TrainFunctionError: If the train function raised; it is also an instance of the user's exception type.
            WorkersLostError: If all workers were lost more often than ``FailureConfig.max_failures`` allows.
            JobLostError: If the job's controller died.
        """
        ending = self._lease.wait(timeout)
        if ending is None:
            raise TimeoutError(
                f"job {self.job!r} has not ended within {timeout:g} s ({_state(self._lease.last)}); "
                "it continues, ask again later or stop() it"
            )
        if ending.outcome is None:
            raise JobLostError(self.job, ending.lost, _state(ending.before or ending.status))
        result = make_result(ending.outcome, self._storage(), timeout_s=self._spec.elastic.storage_timeout_s)
        error = result.error
        if error is None and ending.outcome.phase is JobPhase.FAILED:
            reason = printable(ending.status.message) or "no reason was given"
            error = TrainingFailedError(f"job {self.job!r} failed: {reason}")
        if isinstance(error, TrainFunctionError):
            raise error from error.cause
        if error is not None:
            raise error
        return result

    def status(self) -> JobStatus:
        """Request the job's current status from its controller and return it."""
        answer = self._ask("status")
        if answer is not None and self._lease.ending is None:
            self._lease.answer(answer)
        return self._lease.last

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the rank, node and process of each worker in the current group; empty while no group exists."""
        return tuple(self._ask("workers") or ())

    @property
    def last_status(self) -> JobStatus:
        """Status received with the most recent lease renewal; reading this property sends no request."""
        return self._lease.last

    @property
    def storage_path(self) -> str:
        """Directory that holds the job's events and checkpoints."""
        return self._spec.storage_path

    def events(self, since: int = 0) -> tuple[JobEvent, ...]:
        """Return the job's events so far, oldest first.

        Args:
            since: Number of events to skip, counted from the oldest.
        """
        if since < 0:
            raise ValueError(f"since must be 0 or more, but got {since}")
        answer = self._ask("events", since)
        if answer is not None:
            return tuple(answer)
        ending = self._lease.ending
        events = ending.events if ending is not None else ()
        if ending is not None and ending.outcome is None:  # the controller was lost, its file is there
            storage, timeout_s = self._storage(), self._spec.elastic.storage_timeout_s
            events = call_storage(storage.where, "reading events", storage.read_events, timeout_s=timeout_s)
        return events[since:]

    def explain(self) -> Explanation | None:
        """Return an explanation of the job's number of workers and the effect of adding one.

        Returns:
            An object that ``str()`` formats; None if the job has ended, if the allocator is not running, or if it does
            not know the job yet.

        Raises:
            TimeoutError: The allocator does not respond.
        """
        if self._lease.ending is not None:
            return None
        try:
            allocator = find_actor(ALLOCATOR)
            if allocator is None:  # it is being made
                return None
            answer: Explanation = ray.get(allocator.explain.remote(self.job), timeout=START_TIMEOUT_S)
            return answer
        except GetTimeoutError as error:
            raise TimeoutError(
                f"the allocator has not answered explain() for job {self.job!r} within {START_TIMEOUT_S:g} s; "
                "its node may be overloaded or gone; ask again"
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, KeyError):
                return None
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except (RayActorError, ValueError):  # it is being made again
            return None

    def explain_strategy(self) -> str | None:
        """Return the last choice made by ``strategy="auto"``, as a table of parameters and measured times.

        Returns:
            A table as text; None if no choice has been made yet, or if the user named a strategy other than ``"auto"``.
        """
        chosen = [event for event in self.events() if event.kind is EventKind.STRATEGY]
        return str(chosen[-1].detail.get("table", chosen[-1].reason)) if chosen else None

    def resize(self, workers: int) -> None:
        """Hold the job at a fixed number of workers until :meth:`release`; do nothing if the job has ended.

        The call returns once the controller has accepted the request, without waiting for the workers; ``status()`` and
        ``events()`` show when the size is reached.

        Raises:
            ValueError: If the job is not allowed to have this size.
        """
        low, high = self._spec.min_workers, self._spec.max_workers
        check_whole("workers", workers, least=None)
        if not low <= workers <= high:
            sizes = self._spec.scheduling.allowed_sizes
            within = "" if sizes.free else f", within SchedulingConfig({sizes})"
            raise ValueError(
                f"job {self.job!r} may have {low} to {high} workers, but got {workers}; the limits are those "
                f"of ScalingConfig(num_workers=(min, max)){within}"
            )
        self._ask("resize", int(workers))  # NumPy's too

    def release(self) -> None:
        """Let the allocator choose the job's size again, after :meth:`resize`."""
        self._ask("release")

    def pause(self, reason: str = "paused by JobHandle.pause()") -> None:
        """Save the job after the current step and free its slots until :meth:`resume`.

        The call returns once the controller has accepted the request; ``status().phase`` is ``PAUSED`` when the slots
        are free. A paused job keeps its position in the queue, and its driver must stay alive to renew the lease.

        Args:
            reason: Reason shown in the job's message and events.

        Raises:
            ValueError: If the job saves no state to resume from, is already paused, is about to end, or has ended.
        """
        self._refuse_ended("paused")
        self._ask("pause", reason)

    def resume(self) -> None:
        """Let a paused job continue from its saved state as soon as the allocator has slots for it.

        Raises:
            ValueError: If the job is not paused.
        """
        self._refuse_ended("resumed")
        self._ask("resume")

    def branch(
        self,
        *,
        factors: Sequence[int] = (2, 4),
        steps: int = 400,
        metric: str = "loss",
        tolerance: float = 0.01,
        timeout: float | None = None,
    ) -> BranchResult:
        """Measure the largest batch that does not waste samples, and limit the job's batch to it.

        Each branch is a job with the lowest weight. It starts from this job's newest automatic checkpoint and trains on
        the same samples with a different batch, while this job continues. The call blocks until the result is known;
        see docs/batch.md.

        Args:
            factors: Batches to try, as multiples of the current one; any above the loader's largest batch are skipped.
            steps: Number of steps for the branch that keeps the current batch. The other branches train on the same
                number of samples.
            metric: Name of a reported metric for which smaller is better.
            tolerance: Accepted relative increase of the metric compared with the branch that keeps the current batch.
            timeout: Maximum wait [s]; None waits forever. The branches continue after a timeout.

        Raises:
            BranchError: The job cannot be branched, a branch failed, or its reports are inconclusive.
            ValueError: An argument is out of range, or the job has ended.
            TimeoutError: No result is available within ``timeout``.
        """
        self._refuse_ended("branched")
        self._ask("branch", BranchPlan(factors=tuple(factors), steps=steps, metric=metric, tolerance=tolerance))
        deadline_s = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            result: BranchResult | None = self._ask("branched")
            if result is not None:
                return result
            self._refuse_ended("branched")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the branches of job {self.job!r} have not ended within {timeout:g} s")
            time.sleep(_BRANCH_POLL_S)

    def _refuse_ended(self, what: str) -> None:
        if self.done():
            raise ValueError(f"job {self.job!r} cannot be {what}: it has ended ({self._lease.last.phase.value})")

    def weigh(self, weight: float) -> None:
        """Change the running job's weight (``SchedulingConfig.weight``): how much its speed matters next to other jobs.

        Raises:
            ValueError: If the weight is not above 0 and finite.
        """
        check_number("weight", weight, above=0, finite=True)
        self._ask("weigh", float(weight))

    def next_report(self, after: int | None = None, timeout: float = 10.0) -> Report | None:
        """Wait for the train function's next report and return it.

        Args:
            after: ``index`` of the previous report; None returns the run's first report. A trial blocks in ``report``
                until enough of its reports have been fetched by this method.
            timeout: Maximum wait [s].

        Returns:
            The report; None if none arrived within ``timeout``, or if the job has ended without another report (see
            :meth:`done`).
        """
        deadline = time.monotonic() + timeout
        while self._lease.ending is None:
            left = max(0.0, min(_LONGEST_ASK_S, deadline - time.monotonic()))
            report: Report | None = self._ask("next_report", after, left)
            if report is not None or (self._lease.ending is None and time.monotonic() >= deadline):
                return report
            if self._lease.last.phase.ended:
                self._lease.wait(max(0.0, deadline - time.monotonic()))
        outcome = self._lease.ending.outcome
        if outcome is None:
            return None
        wanted = outcome.first_report if after is None else after + 1
        reports = outcome.reports
        if reports and wanted < reports[0].index:
            if self._reports is None:
                timeout_s = self._spec.elastic.storage_timeout_s
                self._reports = tuple(all_reports(outcome, self._storage(), timeout_s=timeout_s))
            reports = self._reports
        position = bisect.bisect_left(reports, wanted, key=lambda report: report.index)
        return reports[position] if position < len(reports) else None

    def leave(self) -> None:
        """Stop renewing the job's lease: the job ends when the lease runs out, unless another process attaches."""
        self._lease.leave()

    def stop(self, *, now: bool = False, reason: str = "JobHandle.stop() was called") -> None:
        """Request that the job end, without waiting; a later ``result()`` returns its results without an error.

        Args:
            now: If True, end in the middle of a step without saving, and kill the workers at once. Otherwise the job
                saves its state after the current step, and a new job of the same name continues from there.
            reason: Reason shown in the job's message and its last event.
        """
        self._ask("stop", now=now, reason=reason)
        self._lease.poll()

    def _storage(self) -> RunStorage:
        return RunStorage(self._spec.storage_path, self._spec.storage_filesystem)

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a controller method; return None, with ``self._lease.ending`` set, if the job has ended."""
        if self._lease.ending is not None:
            return None
        # The job trains on without its controller for that long: while another process of it starts, calls wait.
        away_s = max(CALL_TIMEOUT_S, self._spec.elastic.controller_timeout_s)
        timeout_s = away_s if self._lease.answered else START_TIMEOUT_S
        try:  # asked twice, while its process is restarted, it does the same
            return call_within(timeout_s, lambda: getattr(self._controller, method).remote(*arguments, **options))
        except (GetTimeoutError, ActorUnavailableError) as error:
            raise TimeoutError(
                f"the controller of job {self.job!r} has not answered {method}() within "
                f"{timeout_s:g} s; its node may be overloaded or gone; ask again"
            ) from error
        except RayActorError as error:
            # It may have closed just now, after the lease thread had collected everything.
            if self._lease.wait(1.0) is None:
                self._lease.lost(error)
            return None
        except RayTaskError as error:  # the controller refused: its own words, without Ray's frames
            raise (error.cause if isinstance(error.cause, Exception) else error) from None


def _state(status: JobStatus) -> str:
    text = f"{status.phase.value}, {status.workers} worker(s), epoch {status.epoch}, step {status.step}"
    return f"{text}, {status.message}" if status.message else text
