"""SHELL: the job's controller, a detached actor: gathers what happens, asks the pure parts, carries out the answer.

It owns the workers, their placement groups and the rendezvous store, so that all of them end with it, however it
ends. The driver holds a lease on it; without renewals it ends the job and itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.batch.tuner import BatchDoesNotFitError, fit_snapshot
from elastic_ray.durability import FIRST_INTERVAL_S
from elastic_ray.events import EventKind, JobEvent, JobOutcome, JobPhase, JobStatus, Report, WorkerInfo
from elastic_ray.job import views
from elastic_ray.job.allocator_link import AllocatorLink
from elastic_ray.job.crew import Crew
from elastic_ray.job.desk import BatchDesk
from elastic_ray.job.feed import ReportFeed
from elastic_ray.job.lease import START_TIMEOUT_S
from elastic_ray.job.losses import Losses
from elastic_ray.job.messages import (
    Assignment,
    Beat,
    RunResult,
    StateSaved,
    WorkerCouldNotForm,
    WorkerFailed,
    WorkerMessage,
    WorkerOutOfMemory,
    WorkerReady,
    WorkerReport,
    WorkerSwitched,
)
from elastic_ray.job.nodes import may_autoscale
from elastic_ray.job.preemption import Preemption
from elastic_ray.job.pulse import Pulse
from elastic_ray.job.record import JobRecord
from elastic_ray.job.spec import JobSpec
from elastic_ray.link import StepReport
from elastic_ray.membership.generation import JobMembership, MembershipConfig
from elastic_ray.membership.plan import Cancel, SetBatch, Stop
from elastic_ray.membership.roster import Phase, number
from elastic_ray.membership.signals import (
    AllLost,
    Announce,
    Complete,
    Finished,
    Instruction,
    Launch,
    Left,
    Lost,
    Note,
    PrepareFailed,
    Ready,
    Release,
    Rerun,
    Reserve,
    StepFailed,
    Stimulus,
    Switched,
    Target,
    Tick,
    Withdraw,
)
from elastic_ray.membership.store import StoreAddress, open_store
from elastic_ray.storage import RunStorage
from placement.actor import NAMESPACE
from placement.jobs import JobView
from placement.knowledge import Prior
from placement.snapshot import on_head

logger = logging.getLogger("elastic_ray.job")

_TICK_S = 0.1
_STOP_GRACE_S = 10.0
# Nobody waits for the only member of a group, so that a busy machine is no reason to give it up.
_ALONE_TIMES_LONGER = 15
_DRIVER = "driver"
_WARM_UP_AFTER_S = 2.0
_STUCK_FAILURES = 10


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
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        self._handle = ray.get_runtime_context().current_actor
        self._name = spec.trial.controller if spec.trial is not None else spec.job
        self._side_tasks: set[asyncio.Task[Any]] = set()
        self._begin(spec)
        self._main = asyncio.get_event_loop().create_task(self._run())

    def _begin(self, spec: JobSpec, named: int = 0) -> None:
        """Set up for a job; the ``named`` workers are those of a trial before it."""
        logging.getLogger("elastic_ray").setLevel(spec.log_level)
        elastic = spec.elastic
        self._spec = spec
        self._record = JobRecord(spec, RunStorage(spec.storage_path, spec.storage_filesystem))
        self._machine = JobMembership(
            MembershipConfig(
                min_workers=spec.min_workers,
                reserve_timeout_s=elastic.reserve_timeout_s,
                join_timeout_s=elastic.join_timeout_s,
                # A member may be busy for as long as a collective may last; the pulse finds those that hang.
                switch_timeout_s=elastic.collective_timeout_s,
            ),
            first_most=self._record.workers_at_most,
            named=named,
        )
        self._crew = Crew(spec, self._take, self._on_result)
        self._desk = BatchDesk(fixed=elastic.fixed_batch)
        self._feed = ReportFeed(
            taken=int((self._record.resume_point or {}).get("reports", 0)),
            ahead=spec.trial.reports_ahead if spec.trial is not None else None,
        )
        self._pulse = Pulse(elastic.heartbeat_timeout_s, alone_s=elastic.heartbeat_timeout_s * _ALONE_TIMES_LONGER)
        self._furthest = (0, 0)
        self._submitted_s = time.time()
        self._lease = Pulse(elastic.lease_s)
        self._lease.heard(_DRIVER)
        self._held_at: int | None = None
        self._weight = spec.scheduling.weight
        self._losses = Losses(spec.max_failures)
        self._resumed = ""
        self._most_workers = 0
        self._resize_cost_s = 0.2
        self._resizes = 0
        self._settled_s = time.monotonic()
        self._stopping_since: float | None = None
        self._preemption = Preemption(elastic.join_timeout_s)
        self._saved = False
        self._returned: set[str] = set()
        self._launched_s: float | None = None
        self._started_s = self._start_s = 0.0
        self._allocator = AllocatorLink(spec, self._handle, self._view, self._advised)
        self._store: Any = None
        self._address: StoreAddress | None = None
        self._launches: list[Launch] = []
        self._given_up: set[str] = set()
        self._before = named
        self._stuck: tuple[int, int] = (-1, 0)
        self._return_value: Any = None
        self._vacated: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._dismissed = asyncio.Event()
        self._next: asyncio.Future[JobSpec] = asyncio.get_event_loop().create_future()
        self._begun = asyncio.Event()

    # -- for drivers -------------------------------------------------------------------------------------------

    async def renew_lease(self) -> JobStatus:
        """The driver lives."""
        self._lease.heard(_DRIVER)
        return self._status()

    async def spec(self) -> JobSpec:
        """What was submitted, without the train function."""
        return dataclasses.replace(self._spec, train_loop=b"")

    async def status(self) -> JobStatus:
        """The job now."""
        return self._status()

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Members of the present generation, by rank."""
        return views.members(self._machine, self._record, self._crew.facts)

    async def events(self, since: int = 0) -> tuple[JobEvent, ...]:
        """All events from number ``since`` on."""
        return tuple(self._record.events[since:])

    async def resize(self, workers: int) -> None:
        """Hold the job at this many workers.

        Raises:
            ValueError: the loader's limits have no use for so many, or it is outside the job's range.
        """
        views.check_size(workers, self._spec, self._desk)
        self._held_at = workers
        self._allocator.soon()

    async def release(self) -> None:
        """Leave the job's size to the allocator again."""
        self._held_at = None
        self._allocator.soon()

    async def weigh(self, weight: float) -> None:
        """Let the job's speed count so many times beside that of others, in place of ``SchedulingConfig.weight``."""
        self._weight = weight
        self._allocator.soon()

    async def next_report(self, after: int | None, wait_s: float) -> Report | None:
        """The report after number ``after``, which has been dealt with; None if none came within ``wait_s``."""
        return await self._feed.next(after, wait_s)

    async def stop(self, *, now: bool = False) -> None:
        """End the job: after the step in progress, or, ``now``, in the middle of it."""
        if now:
            self._finish(JobPhase.STOPPED)
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            self._feed.close()
            members = self._machine.members()
            self._crew.post([member.worker for member in members], Stop())
            if not members:
                self._finish(JobPhase.STOPPED)

    async def outcome(self) -> JobOutcome | None:
        """How the job ended; None while it has not."""
        return self._record.outcome()

    async def close(self) -> None:
        """The driver has all it wants of an ended job."""
        self._closed.set()

    async def dismiss(self) -> None:
        """There will be no other trial: a controller that waits for one need not wait any longer."""
        if self._vacated is not None and self._closed.is_set():
            self._dismissed.set()

    async def renew(self, spec: JobSpec) -> str:
        """Run another trial in the processes of the one that was closed.

        Returns:
            Name of this controller; empty if it waits for no other trial.

        Everything but the train function, its config, and the places of results and checkpoints is to be the same.
        """
        if self._vacated is None or not self._closed.is_set() or self._next.done():
            return ""
        self._next.set_result(spec)
        await self._begun.wait()
        return self._name

    # -- for the allocator -------------------------------------------------------------------------------------

    async def allocate(self, nodes: Mapping[str, int], reason: str) -> None:
        """The allocator's decision for this job."""
        if not self._record.phase.ended and self._stopping_since is None:
            if not nodes and self._record.phase is JobPhase.WAITING:
                self._record.message = reason
            target = Target(nodes=nodes, reason=reason)
            if self._preemption.active:
                self._preemption.follow(target)
            elif not nodes and self._may_be_preempted():
                self._preemption.begin(target, time.monotonic())
            else:
                self._take(target)

    async def unsatisfiable(self, reason: str) -> None:
        """No node could ever offer what the job asks for, as the allocator sees the cluster."""
        if self._machine.current is not None or self._record.phase.ended:
            return
        if await asyncio.to_thread(may_autoscale):
            self._record.message = f"{reason}; waiting, for an autoscaler may bring it"
            return
        from elastic_ray.errors import ImpossibleResourcesError  # imports ray.train

        self._finish(JobPhase.FAILED, error=ImpossibleResourcesError(reason))

    # -- for workers -------------------------------------------------------------------------------------------

    async def push(self, worker: str, message: WorkerMessage) -> None:
        """A worker's message."""
        if worker in self._given_up or number(worker) <= self._before:
            return  # it was declared lost, or served the trial before; the job goes on without it
        self._pulse.heard(worker)
        match message:
            case Beat(ending=True, report=report):
                self._pulse.forget(worker)
                if report is not None:
                    self._observe(report)
            case Beat(report=report, at=at):
                if at is not None and at > self._furthest:
                    # No step is committed without every member, however long one of them cannot beat.
                    self._furthest = at
                    members = {member.worker for member in self._machine.members()}
                    self._pulse.heard(*(members - self._returned))
                if report is not None:
                    self._observe(report)
            case WorkerReady(loader=loader, has_state=has_state, resumed=resumed):
                if resumed and resumed != self._resumed and self._machine.current is None:
                    self._resumed = resumed
                    self._event(EventKind.RESUMED, 0, 0, resumed)
                self._desk.open(loader)
                self._take(Ready(worker=worker, has_state=has_state))
            case WorkerFailed(generation=generation, cause=cause):
                self._take(StepFailed(worker=worker, generation=generation, cause=cause))
            case WorkerCouldNotForm(generation=generation, cause=cause):
                self._take(PrepareFailed(worker=worker, generation=generation, cause=cause))
            case WorkerSwitched(generation=generation, pause_s=pause_s):
                self._take(Switched(worker=worker, generation=generation, pause_s=pause_s))
            case WorkerOutOfMemory(atomic_bsz=atomic_bsz):
                self._out_of_memory(worker, atomic_bsz)
            case WorkerReport():
                dropped = self._record.report(message)
                if dropped:
                    self._in_thread(self._record.delete_checkpoints, dropped)
                self._feed.put(
                    Report(
                        index=message.index,
                        metrics=message.metrics,
                        checkpoint=message.checkpoint,
                        workers=self._machine.world_size,
                    )
                )
                await self._feed.turn(message.index)

    async def saved(self, message: StateSaved) -> float:
        """Rank 0 has written an automatic checkpoint; returns the mean time between losses of the job [s]."""
        self._record.saved(message.state)
        if not self._saved:
            self._saved = True
            self._allocator.soon()  # it may be stopped from now on
        return self._losses.mean_time_s(time.time() - self._submitted_s)

    def _out_of_memory(self, worker: str, atomic_bsz: int) -> None:
        try:
            reason = self._desk.out_of_memory(atomic_bsz)
        except BatchDoesNotFitError as error:
            self._finish(JobPhase.FAILED, error=error)
            return
        workers = self._machine.world_size
        self._event(EventKind.OUT_OF_MEMORY, workers, workers, reason)
        self._take(Rerun(worker=worker))

    def _observe(self, report: StepReport) -> None:
        before = self._desk.observe(report)
        if before is not None:
            detail = {"from_batch_size": before, "to_batch_size": report.batch_size}
            self._event(EventKind.BATCH, report.replicas, report.replicas, self._record.batch_reason, **detail)

    def _on_result(self, worker: str, result: RunResult) -> None:
        if worker in self._given_up:
            return
        self._returned.add(worker)
        self._pulse.forget(worker)
        match result.kind:
            case "finished":
                plan = self._machine.current
                if plan is None or plan.rank_of(worker) == 0 or self._return_value is None:
                    self._return_value = result.value
                self._take(Finished(worker=worker))
            case "left":
                self._take(Left(worker=worker))
            case "stopped":
                self._finish(JobPhase.STOPPED)
            case "preempted":
                pass  # rank 0 saves the job
            case "saved":
                self._suspend(result.cause)
            case "lost":
                self._take(Lost(worker=worker, cause=result.cause))
            case "no room" if self._machine.current is not None:  # the others go on without it
                self._take(Lost(worker=worker, cause=f"out of memory before it could join: {result.cause}"))
            case _:
                self._finish(JobPhase.FAILED, error=result.error)

    # -- the machine -------------------------------------------------------------------------------------------

    def _take(self, stimulus: Stimulus) -> None:
        """Let the membership machine decide, and do what it says."""
        if self._record.phase.ended:
            return
        if not isinstance(stimulus, Tick):
            logger.debug("job %s: %s", self._spec.job, stimulus)
        for instruction in self._machine.handle(stimulus, time.monotonic()):
            self._perform(instruction)

    def _perform(self, instruction: Instruction) -> None:
        logger.debug("job %s: %s", self._spec.job, instruction)
        match instruction:
            case Reserve(worker=worker, node=node):
                self._crew.reserve(worker, node)
            case Launch():
                self._launches.append(instruction)
                self._launch_waiting()
            case Release(worker=worker, kill=kill, reason=reason):
                logger.info("job %s: worker %s gives its resources back: %s", self._spec.job, worker, reason)
                self._pulse.forget(worker)
                if kill:
                    self._given_up.add(worker)
                self._crew.release(worker, kill=kill)
                self._allocator.soon()
            case Announce(plan=plan, to=to):
                self._crew.post(to, dataclasses.replace(plan, batch=self._desk.choose(plan, self._crew.gpu_type(plan))))
            case Withdraw(generation=generation, to=to):
                self._desk.withdraw()
                self._crew.post(to, Cancel(generation=generation))
            case Note():
                self._note(instruction)
            case AllLost(reason=reason):
                self._restart(reason)
            case Complete():
                self._finish(JobPhase.FINISHED)

    def _launch_waiting(self) -> None:
        if self._address is None:
            return
        if self._launches:
            self._record.starting()
            if self._machine.current is None and self._launched_s is None:
                self._launched_s = time.monotonic()
        for launch in self._launches:
            path, point = self._record.restart_point
            self._pulse.forget(launch.worker)
            self._crew.launch(
                Assignment(
                    worker=launch.worker,
                    job=self._spec.job,
                    train_loop=self._spec.train_loop,
                    storage_path=self._spec.storage_path,
                    node=launch.node,
                    controller=self._handle,
                    store=self._address,
                    checkpoint=path,
                    resume_point=point,
                    states=self._record.states if self._machine.current is None else (),
                )
            )
        self._launches.clear()

    def _note(self, note: Note) -> None:
        self._event(
            note.kind,
            note.from_workers,
            note.to_workers,
            note.reason,
            pause_s=note.pause_s,
            generation=note.generation,
        )
        if note.kind is EventKind.CANCELLED:
            return
        if note.kind is EventKind.FAILURE and self._is_stuck():
            cause = f"{_STUCK_FAILURES} groups in a row failed without a single step; the last: {note.reason}"
            self._finish(JobPhase.FAILED, error=RuntimeError(cause))
            return
        if note.kind is EventKind.FAILURE:
            self._losses.some_lost(note.from_workers, note.to_workers)
        self._settled_s = time.monotonic()
        if self._launched_s is not None:
            self._start_s, self._launched_s = self._settled_s - self._launched_s, None
            self._started_s = self._started_s or self._settled_s
        self._record.phase = JobPhase.RUNNING
        self._most_workers = max(self._most_workers, note.to_workers)
        if note.kind is EventKind.RESIZE:
            self._resizes += 1
            self._resize_cost_s += 0.3 * (note.pause_s - self._resize_cost_s)
        self._allocator.soon()

    def _is_stuck(self) -> bool:
        """Whether group after group fails without progress (ranks that run different code, a cut network)."""
        steps = self._desk.latest.total_steps if self._desk.latest is not None else 0
        self._stuck = (steps, self._stuck[1] + 1 if steps == self._stuck[0] else 1)
        return self._stuck[1] > _STUCK_FAILURES

    def _restart(self, reason: str) -> None:
        if not self._losses.all_lost():
            from elastic_ray.errors import WorkersLostError  # imports ray.train, which a start must not wait for

            failures, limit = self._losses.failures, self._spec.max_failures
            self._finish(JobPhase.FAILED, error=WorkersLostError(self._spec.job, failures, limit, reason))
            return
        self._start_again(reason)

    def _start_again(self, reason: str) -> None:
        """From what was saved last, without what has been trained since."""
        steps = (self._record.resume_point or {}).get("steps")
        start = "anew" if steps is None else f"from step {steps}"
        self._event(EventKind.RESTART, self._machine.world_size, 0, f"{reason}; it starts {start}")
        self._give_all_back()

    def _may_be_preempted(self) -> bool:
        """Whether it trains, nobody has come to the end of the train function, and it can be saved, as far as known."""
        if not self._spec.states_kept or self._machine.current is None or self._machine.in_phase(Phase.FINISHED):
            return False
        return self._saved or time.monotonic() - self._started_s < 2.0 * FIRST_INTERVAL_S

    def _training(self) -> set[str]:
        """Members whose train function runs."""
        members = [*self._machine.members(), *self._machine.entering()]
        return {member.worker for member in members} - self._returned

    def _suspend(self, why_not_saved: str) -> None:
        """All ranks have stopped at the same step, and rank 0 has saved it, or nobody could."""
        if not self._preemption.active or self._record.phase.ended:
            return
        reason = self._preemption.reason
        if self._stopping_since is not None:
            self._finish(JobPhase.STOPPED)
        elif why_not_saved:
            self._start_again(f"preempted ({reason}) but not saved: {why_not_saved}")
        else:
            pause_s = self._preemption.lasted_s(time.monotonic())
            self._event(EventKind.PREEMPTED, self._machine.world_size, 0, reason, pause_s=pause_s)
            self._give_all_back()

    def _give_all_back(self) -> None:
        """Begin with other workers once the allocator says where."""
        then = self._preemption.end()
        waits = then is not None and not then.nodes
        self._record.phase = JobPhase.WAITING if waits else JobPhase.STARTING
        self._record.message = then.reason if then is not None and waits else ""
        for instruction in self._machine.reset(first_most=self._record.workers_at_most):
            self._perform(instruction)
        if waits:
            self._crew.keep_warm(())
        if self._store is None:  # it was the sweep's, which may be gone
            self._address = None
            self._side(self._open_store())
        if then is not None:
            self._take(then)
        self._allocator.soon()

    def _event(
        self,
        kind: EventKind,
        before: int,
        after: int,
        reason: str,
        *,
        pause_s: float = 0.0,
        generation: int = 0,
        **detail: Any,
    ) -> None:
        event = JobEvent(
            kind=kind,
            time_s=time.time(),
            from_workers=before,
            to_workers=after,
            reason=reason,
            pause_s=pause_s,
            generation=generation or self._machine.generation,
            detail=detail,
        )
        logger.info(
            "job %s: %s %d->%d workers, pause %.2f s (%s)",
            self._spec.job,
            kind.value,
            before,
            after,
            pause_s,
            reason,
        )
        self._record.event(event)
        self._in_thread(self._record.write_events)

    # -- the clock ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """The controller's life: one job, or one trial after the other while they come in time."""
        await self._run_job()
        while await self._is_renewed():
            await self._run_job()
        await asyncio.sleep(0.2)  # let the last answers out
        # exit_actor() raises an exception that only a task of Ray's own understands
        ray.kill(self._handle)

    async def _run_job(self) -> None:
        """Until the job has ended and its driver has fetched the outcome, or is gone."""
        try:
            await self._open_store()
            self._in_thread(self._record.delete_checkpoints, self._record.surplus)
            while not self._over():
                await asyncio.sleep(_TICK_S)
                if not self._record.phase.ended:
                    await self._tick()
        except Exception as error:  # a bug of ours must end the job with its reason, not leave it hanging
            logger.exception("job %s: its controller failed", self._spec.job)
            self._finish(JobPhase.FAILED, error=error)
            while not self._over():
                await asyncio.sleep(_TICK_S)
        if not self._record.phase.ended:
            logger.warning("job %s: its driver is gone, so it ends", self._spec.job)
            self._finish(JobPhase.STOPPED)

    async def _is_renewed(self) -> bool:
        """Wait for another trial, if this job is one whose processes are kept."""
        if self._vacated is None or self._spec.trial is None or not self._closed.is_set():
            return False
        waits: set[asyncio.Future[Any]] = {self._next, asyncio.ensure_future(self._dismissed.wait())}
        _, pending = await asyncio.wait(waits, timeout=self._spec.trial.keep_s, return_when=asyncio.FIRST_COMPLETED)
        for each in pending:
            each.cancel()  # whoever comes now is late
        await self._vacated
        if self._next.cancelled():
            return False
        begun = self._begun
        self._begin(self._next.result(), self._machine.named)
        begun.set()
        return True

    def _over(self) -> bool:
        return self._closed.is_set() or bool(self._lease.silent(time.monotonic(), (_DRIVER,)))

    async def _open_store(self) -> None:
        shared = await self._shared_store()
        if shared is not None:
            self._address = dataclasses.replace(shared, prefix=f"{self._spec.job}/{secrets.token_hex(4)}")
        else:
            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._store = await asyncio.to_thread(open_store, host)
            self._address = StoreAddress(host=host, port=self._store.port)
        self._launch_waiting()

    async def _shared_store(self) -> StoreAddress | None:
        trial = self._spec.trial
        if trial is None or trial.sweep is None:
            return None
        try:
            address: StoreAddress = await asyncio.wait_for(trial.sweep.store.remote(), START_TIMEOUT_S)
        except (RayError, asyncio.TimeoutError) as error:
            logger.warning("job %s: opens a store of its own, for its sweep does not answer: %s", self._spec.job, error)
            return None
        return address

    async def _tick(self) -> None:
        now_s = time.monotonic()
        members = self._machine.watched()
        for worker, silence_s in self._pulse.silent(now_s, members):
            self._take(Lost(worker=worker, cause=f"it has been silent for {silence_s:.1f} s (hung or cut off)"))
        for worker in set(self._pulse.questionable()) & members:
            self._side(self._look_at(worker))
        self._take(Tick())
        if self._stopping_since is not None and now_s - self._stopping_since > _STOP_GRACE_S:
            self._finish(JobPhase.STOPPED)
        if self._preemption.remind(now_s):
            self._crew.post(self._training(), Stop(save=True))
        if why := self._preemption.failed(now_s, self._training()):
            self._suspend(why)
        snapshot = self._desk.due(now_s)
        if snapshot is not None:
            self._side(self._fit(snapshot))
        if now_s - self._settled_s > _WARM_UP_AFTER_S and self._machine.current is not None:
            self._crew.keep_warm({m.node for m in self._machine.current.members})
        self._allocator.tick(now_s)

    async def _look_at(self, worker: str) -> None:
        """One that is silent may be stopped or starved: its node knows."""
        running = await self._crew.is_running(worker, self._spec.elastic.heartbeat_timeout_s / 2)
        if running:
            self._pulse.excuse(worker)
        elif running is False and self._pulse.questioned(worker):
            self._take(Lost(worker=worker, cause="its process is stopped or gone"))

    async def _fit(self, snapshot: Any) -> None:
        self._change_batch(self._desk.fitted(await asyncio.to_thread(fit_snapshot, snapshot)))

    def _advised(self, priors: Mapping[str, Prior]) -> None:
        """What others have measured of this job's model."""
        self._change_batch(self._desk.advise(priors))

    def _change_batch(self, change: tuple[BatchChoice, str] | None) -> None:
        plan = self._machine.current
        if change is not None and plan is not None and self._machine.in_flight is None:
            choice, self._record.batch_reason = change
            self._crew.post([plan.members[0].worker], SetBatch(generation=plan.generation, batch=choice))

    def _view(self) -> JobView:
        return views.allocator_view(
            self._spec,
            self._desk,
            resume_point=self._record.resume_point,
            submitted_s=self._submitted_s,
            held_at=self._held_at,
            allocation=self._crew.reserved(),
            most_workers=self._most_workers,
            resize_cost_s=self._resize_cost_s,
            stop_cost_s=self._start_s if self._saved and self._may_be_preempted() else None,
            resizes=self._resizes,
            weight=self._weight,
        )

    # -- the end -----------------------------------------------------------------------------------------------

    def _finish(self, phase: JobPhase, *, error: BaseException | None = None) -> None:
        if self._record.phase.ended:
            return
        workers = self._machine.world_size
        reason = views.explain(error, phase)
        self._event(EventKind.FINISHED, workers, 0, reason)
        self._record.end(phase, error=error, return_value=self._return_value, message=reason)
        self._feed.close()
        self._desk.close()
        if phase is JobPhase.FINISHED and self._spec.states_kept:
            self._in_thread(self._record.delete_states)
        if self._spec.trial is not None and self._spec.trial.keep_s and phase is not JobPhase.FAILED:
            self._vacated = asyncio.get_running_loop().create_task(self._vacate())
        else:
            self._crew.disband()
            self._allocator.ended()

    async def _vacate(self) -> None:
        self._crew.post([member.worker for member in self._machine.members()], Stop())
        await self._crew.vacate()
        self._allocator.ended()

    def _status(self) -> JobStatus:
        return views.job_status(self._spec, self._desk, self._record, self._machine)

    def _side(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._side_tasks.add(task)
        task.add_done_callback(self._side_tasks.discard)
        return task

    def _in_thread(self, function: Any, *arguments: Any) -> None:
        self._side(asyncio.to_thread(function, *arguments))
