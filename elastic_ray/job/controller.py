"""SHELL: the job's controller, a detached actor: runs one job, or one trial of a sweep after the other.

It owns the workers, their placement groups and the rendezvous store, so that all of them end with it, however it
ends; what a trial has of its sweep's, the sweep's actor owns. The driver holds a lease on it; without renewals it ends
the job and itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray

from elastic_ray.events import JobEvent, JobOutcome, JobPhase, JobStatus, Report, WorkerInfo
from elastic_ray.job.background import Background
from elastic_ray.job.messages import StateSaved, WorkerMessage
from elastic_ray.job.nodes import may_autoscale
from elastic_ray.job.pulse import Pulse
from elastic_ray.job.running import RunningJob
from elastic_ray.job.spec import JobSpec
from placement.actor import NAMESPACE
from placement.snapshot import on_head
from placement.text import log_plainly

logger = logging.getLogger("elastic_ray.job")

_TICK_S = 0.1
_DRIVER = "driver"


def start(spec: JobSpec) -> Any:
    """Create the job's controller; raises ``ValueError`` when a controller of that name is alive."""
    actor: Any = ray.remote(JobController)
    # A worker node that goes away must not take the job's memory of itself along; without the head nothing runs.
    return actor.options(
        name=f"job:{spec.trial.controller if spec.trial is not None else spec.job}",
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=1000,
        scheduling_strategy="DEFAULT",  # never the placement group that the caller may be in
        **on_head(),
    ).remote(spec)


class JobController:
    """Actor class; see the module's text. Methods are coroutines of one event loop, so nothing here needs a lock."""

    def __init__(self, spec: JobSpec) -> None:
        log_plainly(logging.WARNING)
        self._handle = ray.get_runtime_context().current_actor
        self._name = spec.trial.controller if spec.trial is not None else spec.job
        self._background = Background()
        self._begin(spec)
        self._main = asyncio.get_event_loop().create_task(self._run())

    def _begin(self, spec: JobSpec, named: int = 0) -> None:
        logging.getLogger("elastic_ray").setLevel(spec.log_level)
        self._spec = spec
        self._job = RunningJob(spec, self._handle, self._background, named=named)
        self._lease = Pulse(spec.elastic.lease_s)
        self._lease.heard(_DRIVER)
        self._closed = asyncio.Event()
        self._dismissed = asyncio.Event()
        self._next: asyncio.Future[JobSpec] = asyncio.get_event_loop().create_future()
        self._begun = asyncio.Event()

    # -- for drivers -------------------------------------------------------------------------------------------

    async def renew_lease(self) -> JobStatus:
        """The driver lives."""
        self._lease.heard(_DRIVER)
        return self._job.status()

    async def spec(self) -> JobSpec:
        """What was submitted, without the train function."""
        trial = self._spec.trial
        if trial is not None:
            trial = dataclasses.replace(trial, held=None)  # whoever asks is not to keep it alive
        return dataclasses.replace(self._spec, train_loop=b"", trial=trial)

    async def status(self) -> JobStatus:
        """The job now."""
        return self._job.status()

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Members of the present generation, by rank."""
        return self._job.workers()

    async def events(self, since: int = 0) -> tuple[JobEvent, ...]:
        """All events from number ``since`` on."""
        return tuple(self._job.record.events[since:])

    async def resize(self, workers: int) -> None:
        """Hold the job at this many workers.

        Raises:
            ValueError: the loader's limits have no use for so many, or it is outside the job's range.
        """
        self._job.hold(workers)

    async def release(self) -> None:
        """Leave the job's size to the allocator again."""
        self._job.hold(None)

    async def weigh(self, weight: float) -> None:
        """Let the job's speed count so many times beside that of others, in place of ``SchedulingConfig.weight``."""
        self._job.weigh(weight)

    async def next_report(self, after: int | None, wait_s: float) -> Report | None:
        """The report after number ``after``, which has been dealt with; None if none came within ``wait_s``."""
        return await self._job.feed.next(after, wait_s)

    async def stop(self, *, now: bool = False) -> None:
        """End the job: after the step in progress, or, ``now``, in the middle of it."""
        if now:
            self._job.finish(JobPhase.STOPPED)
        self._job.stop()

    async def outcome(self) -> JobOutcome | None:
        """How the job ended; None while it has not."""
        return self._job.record.outcome()

    async def close(self) -> None:
        """The driver has all it wants of an ended job."""
        self._closed.set()

    # -- for sweeps --------------------------------------------------------------------------------------------

    async def dismiss(self) -> None:
        """There will be no other trial: a controller that waits for one need not wait any longer."""
        if self._job.vacated is not None and self._closed.is_set():
            self._dismissed.set()

    async def renew(self, spec: JobSpec) -> str:
        """Run another trial after the one that was closed.

        Returns:
            Name of this controller; empty if it waits for no other trial.

        Everything but the train function, its config, and the places of results and checkpoints is to be the same.
        """
        if self._job.vacated is None or not self._closed.is_set() or self._next.done():
            return ""
        begun = self._begun
        self._next.set_result(spec)
        await begun.wait()
        return self._name

    # -- for the allocator -------------------------------------------------------------------------------------

    async def allocate(self, nodes: Mapping[str, int], reason: str) -> None:
        """The allocator's decision for this job."""
        self._job.allocate(nodes, reason)

    async def unsatisfiable(self, reason: str, final: bool) -> None:
        """No node could ever offer what the job asks for, as the allocator sees the cluster.

        ``final``: nor could one that the allocator's own autoscaling may ask for.
        """
        job = self._job
        if job.group.machine.current is not None or job.record.phase.ended:
            return
        if not final and await asyncio.to_thread(may_autoscale):
            job.record.message = f"{reason}; waiting, for an autoscaler may bring it"
            return
        from elastic_ray.errors import ImpossibleResourcesError  # imports ray.train

        job.finish(JobPhase.FAILED, error=ImpossibleResourcesError(reason))

    # -- for workers -------------------------------------------------------------------------------------------

    async def push(self, worker: str, message: WorkerMessage) -> bool:
        """A worker's message; whether the job goes on."""
        job = self._job
        await job.hear(worker, message)
        return not job.record.phase.ended

    async def saved(self, message: StateSaved) -> float:
        """Rank 0 has written an automatic checkpoint; returns the mean time between losses of the job [s]."""
        return self._job.saved(message)

    # -- the clock ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """The controller's life: one job, or one trial after the other while they come in time."""
        try:
            await self._run_job()
            while await self._is_renewed():
                await self._run_job()
        except Exception:  # whoever waits for it learns of its end
            logger.exception("job %s: its controller ends", self._spec.job)
        await asyncio.sleep(0.2)  # let the last answers out
        # exit_actor() raises an exception that only a task of Ray's own understands
        ray.kill(self._handle)

    async def _run_job(self) -> None:
        """Until the job has ended and its driver has fetched the outcome, or is gone."""
        job = self._job
        try:
            await job.open()
            while not self._over():
                await asyncio.sleep(_TICK_S)
                if not job.record.phase.ended:
                    job.tick()
        except Exception as error:  # a bug of ours must end the job with its reason, not leave it hanging
            logger.exception("job %s: its controller failed", self._spec.job)
            job.finish(JobPhase.FAILED, error=error)
            while not self._over():
                await asyncio.sleep(_TICK_S)
        if not job.record.phase.ended:
            logger.warning("job %s: its driver is gone, so it ends", self._spec.job)
            job.finish(JobPhase.STOPPED)

    async def _is_renewed(self) -> bool:
        """Wait for another trial, if this job is one whose processes are kept."""
        if self._job.vacated is None or self._spec.trial is None or not self._closed.is_set():
            return False
        waits: set[asyncio.Future[Any]] = {self._next, asyncio.ensure_future(self._dismissed.wait())}
        _, pending = await asyncio.wait(waits, timeout=self._spec.trial.keep_s, return_when=asyncio.FIRST_COMPLETED)
        for each in pending:
            each.cancel()  # whoever comes now is late
        await self._job.vacated
        if self._next.cancelled():
            return False
        begun = self._begun
        self._begin(self._next.result(), self._job.group.machine.named)
        begun.set()
        return True

    def _over(self) -> bool:
        return self._closed.is_set() or bool(self._lease.silent(time.monotonic(), (_DRIVER,)))
