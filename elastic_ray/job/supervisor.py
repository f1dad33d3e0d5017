"""SHELL: one job under its controller: gathers what happens to it, asks the pure parts, carries out the answer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.batch.tuner import BatchDoesNotFitError, fit_snapshot
from elastic_ray.events import EventKind, JobEvent, JobPhase, JobStatus, Report, WorkerInfo
from elastic_ray.job.allocator_link import AllocatorLink
from elastic_ray.job.background import Background
from elastic_ray.job.batch_planner import BatchDesk
from elastic_ray.job.journal import Journal, Noted, as_text, from_text, run_of
from elastic_ray.job.preemption import Preemption
from elastic_ray.job.spec import JobSpec
from elastic_ray.membership.plan import Cancel, SetBatch, Stop
from elastic_ray.membership.roster import Phase
from elastic_ray.membership.signals import (
    Finished,
    Left,
    Lost,
    Note,
    PrepareFailed,
    Ready,
    Rerun,
    StepFailed,
    Switched,
    Target,
)
from elastic_ray.record import views
from elastic_ray.record.losses import Losses
from elastic_ray.record.record import JobRecord
from elastic_ray.record.report_queue import ReportFeed
from elastic_ray.record.writer import Scribe, unreadable
from elastic_ray.sealed import Raised, Sealed
from elastic_ray.session.link import StepReport
from elastic_ray.worker.messages import (
    Beat,
    Introduction,
    RunResult,
    StateSaved,
    WorkerCouldNotForm,
    WorkerFailed,
    WorkerMessage,
    WorkerOutOfMemory,
    WorkerReady,
    WorkerReport,
    WorkerSwitched,
    WorkerTold,
)
from elastic_ray.worker_group.group import WorkerGroup
from placement.allocator.actor import HeartbeatReply
from placement.cluster.jobs import JobView

logger = logging.getLogger("elastic_ray.job")

_STOP_GRACE_S = 10.0
_NOTE_S = 0.5
_REVIVALS_WITHIN_S = 300.0
_MOST_REVIVALS = 10  # a controller that dies so often does so by itself
_LOOK_AGAIN_S = 10.0


class RunningJob:
    """From its submission to its end. All of it runs in the controller's event loop, so nothing here needs a lock.

    Args:
        spec: the job.
        controller: handle of its controller, for workers and the allocator.
        background: what runs beside the loop, and may outlast the job.
        journal: for the controller that Ray starts in this one's place when its process dies.
        named: workers of the trial that the controller ran before; their messages come too late.

    Attributes:
        record: its phase, events and reports.
        feed: its reports, one by one.
        group: its workers.
        vacated: the task that makes processes ready for another trial; None for a job whose processes end with it.
    """

    def __init__(
        self, spec: JobSpec, controller: Any, background: Background, journal: Journal, *, named: int = 0
    ) -> None:
        self._spec, self._background, self._journal = spec, background, journal
        self.record = JobRecord(spec)
        self._scribe = Scribe(spec, self.record, background, self._of_storage)
        self._desk = BatchDesk(fixed=spec.elastic.fixed_batch)
        self.group = WorkerGroup(spec, controller, self.record, self._desk, background, self, named=named)
        self._allocator = AllocatorLink(spec, controller, self._view, self._hear_allocator)
        self.feed = ReportFeed(ahead=spec.trial.reports_ahead if spec.trial is not None else None)
        self._losses = Losses(spec.max_failures)
        self._preemption = Preemption(spec.elastic.join_timeout_s)
        self._submitted_s, self._begin_s = time.time(), time.monotonic()
        self._held_at: int | None = None
        self._weight = spec.scheduling.weight
        self._saved = False
        self._torn = False
        self._resumed = ""
        self._stopping_since: float | None = None
        self._revivals: tuple[float, ...] = ()
        self._claimed: set[int] = set()
        self._opened = False
        self._first_report: int | None = None
        self._caught_up = False
        self._error: BaseException | Raised | None = None
        self._return_value: Sealed | None = None
        self._begun_after = 0
        self._looking = False
        self._later: Target | None = None
        self._written: asyncio.Task[None] | None = None
        self.vacated: asyncio.Task[None] | None = None

    # -- for drivers -------------------------------------------------------------------------------------------

    def status(self) -> JobStatus:
        """The job now."""
        return views.job_status(self._spec, self._desk, self.record, self.group.machine)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Members of the present generation, by rank."""
        return views.members(self.group.machine, self.record, self.group.facts)

    def hold(self, workers: int | None) -> None:
        """Hold the job at this many workers; None leaves its size to the allocator.

        Raises:
            ValueError: the loader's limits have no use for so many, or it is outside the job's range.
        """
        if workers is not None:
            views.check_size(workers, self._spec, self._desk)
        self._held_at = workers
        self._allocator.soon()

    def weigh(self, weight: float) -> None:
        """Let the job's speed count so many times beside that of others."""
        self._weight = weight
        self._allocator.soon()

    def stop(self) -> None:
        """End the job after the step in progress."""
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
            self.feed.close()
            self.group.post_to_members(Stop())
            if self._looking or not self.group.machine.members():
                self.finish(JobPhase.STOPPED)

    # -- for the allocator -------------------------------------------------------------------------------------

    def allocate(self, nodes: Mapping[str, int], reason: str) -> None:
        """The allocator's decision for this job."""
        if self.record.phase.ended or self._stopping_since is not None:
            return
        if not nodes and self.record.phase is JobPhase.WAITING:
            self.record.message = reason
        target = Target(nodes=nodes, reason=reason)
        if self._looking:
            self._later = target
        elif self._preemption.active:
            self._preemption.follow(target)
        elif not nodes and self._may_be_preempted():
            self._preemption.begin(target, time.monotonic())
        else:
            self.group.take(target)

    # -- for workers -------------------------------------------------------------------------------------------

    async def hear(self, worker: str, message: WorkerMessage) -> None:
        """A worker's message; a trial's report is answered when training may go on."""
        if not self.group.heard(worker):
            return
        match message:
            case Beat():
                self.group.beat(worker, message)
                self.record.waits(worker, "" if message.ending else message.waits)
                if message.report is not None:
                    self._observe(message.report)
            case WorkerReady(loader=loader, has_state=has_state, loaded=loaded, resumed=resumed):
                if resumed and resumed != self._resumed and self.group.machine.current is None:
                    self._resumed = resumed
                    self._event(EventKind.RESUMED, 0, 0, resumed)
                self._desk.open(loader)
                self.group.take(Ready(worker=worker, has_state=has_state, loaded=loaded))
            case WorkerFailed(generation=generation, cause=cause):
                self.group.take(StepFailed(worker=worker, generation=generation, cause=cause))
            case WorkerCouldNotForm(generation=generation, cause=cause):
                self.group.take(PrepareFailed(worker=worker, generation=generation, cause=cause))
            case WorkerSwitched(generation=generation, pause_s=pause_s):
                self.group.take(Switched(worker=worker, generation=generation, pause_s=pause_s))
            case WorkerOutOfMemory(atomic_bsz=atomic_bsz, whole=whole):
                self._out_of_memory(worker, atomic_bsz, whole=whole)
            case WorkerTold(kind=kind, text=text, detail=detail):
                self.record.told = text
                workers = self.group.machine.world_size
                self._event(EventKind(kind), workers, workers, text, detail=detail)
            case WorkerReport():
                await self._report(message)

    def _observe(self, report: StepReport) -> None:
        before = self._desk.observe(report)
        if before is not None:
            detail = {"from_batch_size": before, "to_batch_size": report.batch_size}
            self._event(EventKind.BATCH, report.replicas, report.replicas, self.record.batch_reason, detail=detail)

    async def _report(self, message: WorkerReport) -> None:
        trial, workers = self._spec.trial, self.group.machine.world_size
        if message.again:
            self._report_again(message, workers)
            return
        self._scribe.delete(self.record.report(message, workers))
        if message.problem:
            self._of_storage(message.problem)
        if message.held is not None and trial is not None and trial.sweep is not None:
            trial.sweep.hold.remote(trial.controller, message.checkpoint, (message.held,))
        self.feed.put(
            Report(
                index=message.index,
                metrics=message.metrics,
                checkpoint=message.checkpoint,
                workers=workers,
                epochs_done=int(message.resume_point.get("epoch", 0)),
            )
        )
        await self.feed.turn(message.index)

    def _report_again(self, message: WorkerReport, workers: int) -> None:
        """A report that the controller before this one has heard; its checkpoint, if any, was found in storage."""
        if (report := self.record.report_again(message, workers)) is not None:
            self.feed.put(report)

    async def next_report(self, after: int | None, wait_s: float) -> Report | None:
        """The report after number ``after``, which has been dealt with; None if none came within ``wait_s``."""
        wanted = self.feed.wanted(after)
        if self.feed.gone(wanted):
            report = await self._scribe.report(wanted, self.feed.oldest - 1)
            return report or await self.feed.next(self.feed.oldest - 1, wait_s)
        return await self.feed.next(after, wait_s)

    def saved(self, message: StateSaved) -> float:
        """Rank 0 has written an automatic checkpoint; returns the mean time between losses of the job [s]."""
        self.record.saved(message.state)
        if not self._saved:
            self._saved = True
            self._allocator.soon()  # it may be stopped from now on
        return self._losses.mean_time_s(time.monotonic() - self._begin_s)

    def claim_fault(self, index: int) -> bool:
        """Whether fault number ``index`` of the script has not struck yet; it has, afterwards."""
        fresh = index not in self._claimed
        self._claimed.add(index)
        return fresh

    def _out_of_memory(self, worker: str, atomic_bsz: int, *, whole: bool) -> None:
        try:
            reason = self._desk.out_of_memory(atomic_bsz)
        except BatchDoesNotFitError as error:
            self.finish(JobPhase.FAILED, error=error)
            return
        workers = self.group.machine.world_size
        self._event(EventKind.OUT_OF_MEMORY, workers, workers, reason)
        if not whole:
            self._torn = True
        self.group.take(Rerun(worker=worker, has_state=whole))
        self._torn = False

    # -- for the group of workers ------------------------------------------------------------------------------

    def came_back(self, worker: str, result: RunResult) -> None:
        """A run of the train function has ended."""
        match result.kind:
            case "finished":
                plan = self.group.machine.current
                if plan is None or plan.rank_of(worker) == 0 or self._return_value is None:
                    self._return_value = result.value
                self.group.take(Finished(worker=worker))
            case "left":
                self.group.take(Left(worker=worker))
            case "stopped":
                self.finish(JobPhase.STOPPED)
            case "preempted":
                pass  # rank 0 saves the job
            case "saved":
                self._suspend(result.cause)
            case "lost":
                self.group.take(Lost(worker=worker, cause=result.cause))
            case "no room" if self.group.machine.current is not None:  # the others go on without it
                self.group.take(Lost(worker=worker, cause=f"out of memory before it could join: {result.cause}"))
            case _:
                self.finish(JobPhase.FAILED, error=result.error)

    def noted(self, note: Note) -> None:
        """A group trains, or has failed."""
        self.record.nobody_waits()
        before, after, history = note.from_workers, note.to_workers, self.group.history
        self._event(note.kind, before, after, note.reason, pause_s=note.pause_s, generation=note.generation)
        if note.kind is EventKind.CANCELLED:
            return
        if note.kind is EventKind.FAILURE:
            steps = self._desk.latest.total_steps if self._desk.latest is not None else 0
            if history.is_stuck(steps):
                self.finish(JobPhase.FAILED, error=RuntimeError(history.stuck_because(note.reason)))
                return
            self._losses.some_lost(before, after)
        history.settled(note, time.monotonic())
        self.record.phase = JobPhase.RUNNING
        self._allocator.soon()

    def all_lost(self, reason: str) -> None:
        """Nobody is left."""
        if self._looking:
            return
        if self._torn:  # inside optimizer.step on every worker: bounded by the batch sizes that are tried
            self._look_and_start_again(reason)
            return
        if not self._losses.all_lost():
            from elastic_ray.errors import WorkersLostError  # imports ray.train, which a start must not wait for

            failures, limit = self._losses.failures, self._spec.max_failures
            self.finish(JobPhase.FAILED, error=WorkersLostError(self._spec.job, failures, limit, reason))
            return
        self._look_and_start_again(reason)

    def complete(self) -> None:
        """All have left the train function."""
        self.finish(JobPhase.FINISHED)

    def released(self) -> None:
        """Resources were given back."""
        self._allocator.soon()

    # -- starting again ----------------------------------------------------------------------------------------

    def _look_and_start_again(self, reason: str) -> None:
        if not self._looking and not self.record.phase.ended:
            self._looking = True
            self._background.start(self._start_again(reason))

    async def _start_again(self, reason: str) -> None:
        """From what was saved last, whoever has heard of it, without what has been trained since."""
        timeout_s = self._spec.elastic.storage_timeout_s
        knows = self.record.looked or self.record.resume_point is not None
        try:
            await self._look(min(_LOOK_AGAIN_S, timeout_s) if knows else timeout_s)
        except Exception as error:  # whatever it is, the job must not wait for ever
            if not knows:  # as after the controller's own restart: to start anew would lose what was trained
                self.finish(JobPhase.FAILED, error=unreadable(self._spec, error))
            logger.warning("job %s: it starts from what its controller knows: %s", self._spec.job, error)
        self._looking = False
        if self.record.phase.ended:
            return
        steps = (self.record.resume_point or {}).get("steps")
        start = f"from step {steps}" if steps is not None else "anew"
        self._event(EventKind.RESTART, self.group.machine.world_size, 0, f"{reason}; it starts {start}")
        self._give_all_back()
        if (later := self._later) is not None:
            self._later = None
            self.allocate(later.nodes, later.reason)

    async def _look(self, timeout_s: float) -> None:
        """Look what storage has of the run.

        Raises:
            OSError: it could not be read within ``timeout_s``.
        """
        stored = await self._scribe.look(timeout_s)
        self._scribe.delete(self.record.found(stored))
        last = stored.checkpoints[-1] if stored.checkpoints else None
        if self._looking and last is not None and last.index > max(self.record.last_report, self._begun_after):
            # Its rank 0 was lost before it could tell.
            self.record.restored(last)
            self.feed.put(Report(index=last.index, metrics=last.metrics, checkpoint=last.path))

    def _may_be_preempted(self) -> bool:
        """Whether it trains, nobody has come to the end of the train function, and it can be saved, as far as known."""
        if (
            not self._spec.states_kept
            or self.group.machine.current is None
            or self.group.machine.in_phase(Phase.FINISHED)
        ):
            return False
        return self._saved or self.group.history.saves_soon(time.monotonic())

    def _suspend(self, why_not_saved: str) -> None:
        """All ranks have stopped at the same step, and rank 0 has saved it, or nobody could."""
        if not self._preemption.active or self._looking or self.record.phase.ended:
            return
        reason = self._preemption.reason
        if self._stopping_since is not None:
            self.finish(JobPhase.STOPPED)
        elif why_not_saved:
            self._look_and_start_again(f"preempted ({reason}) but not saved: {why_not_saved}")
        else:
            pause_s = self._preemption.lasted_s(time.monotonic())
            self._event(EventKind.PREEMPTED, self.group.machine.world_size, 0, reason, pause_s=pause_s)
            self._give_all_back()

    def _give_all_back(self) -> None:
        """Begin with other workers once the allocator says where."""
        self.record.nobody_waits()
        then = self._preemption.end()
        waits = then is not None and not then.nodes
        self.record.phase = JobPhase.WAITING if waits else JobPhase.STARTING
        self.record.message = then.reason if then is not None and waits else ""
        self.group.begin_again(waits=waits)
        if then is not None:
            self.group.take(then)
        self._allocator.soon()

    # -- when the controller's process dies --------------------------------------------------------------------

    def note_down(self) -> None:
        """For the controller after this one."""
        self._journal.note(self._noted())

    def _noted(self) -> Noted:
        machine, history, goal = self.group.machine, self.group.history, self.group.goal
        return Noted(
            job=self._spec.job,
            run=run_of(self._spec),
            phase=self.record.phase.value,
            message=self.record.message,
            submitted_s=self._submitted_s,
            issued=machine.issued,
            announced=machine.announced,
            trained=machine.trained,
            world_size=machine.world_size,
            named=machine.named,
            earlier=self.group.earlier,
            nodes=dict(goal.nodes),
            reason=goal.reason,
            held_at=self._held_at,
            weight=self._weight,
            failures=self._losses.failures,
            lost=self._losses.lost,
            most_workers=history.most_workers,
            resizes=history.resizes,
            resize_cost_s=history.resize_cost_s,
            start_s=history.start_s,
            saved=self._saved,
            stopping=self._stopping_since is not None,
            preempted=self._preemption.reason if self._preemption.active else None,
            processes=self.group.processes(),
            homes=self.group.homes(),
            pids={worker: facts.pid for worker, facts in self.group.facts.items()},
            revivals=self._revivals,
            claimed=tuple(sorted(self._claimed)),
            first_report=self.record.first_report,
            return_value=as_text(self._return_value) if self.record.phase.ended else None,
        )

    def recall(self, noted: Noted, events: tuple[JobEvent, ...]) -> None:
        """What the controller before this one has noted down."""
        now_s = time.time()
        self.record.recall(JobPhase(noted.phase), noted.message, events)
        self._submitted_s = noted.submitted_s
        self._begin_s = time.monotonic() - max(0.0, now_s - noted.submitted_s)
        self._held_at, self._weight, self._saved = noted.held_at, noted.weight, noted.saved
        self._losses.failures, self._losses.lost = noted.failures, noted.lost
        self.group.history.recall(noted)
        self._revivals = (*(at_s for at_s in noted.revivals if now_s - at_s < _REVIVALS_WITHIN_S), now_s)
        self._claimed, self._first_report = set(noted.claimed), noted.first_report
        self._return_value = from_text(noted.return_value)

    def note_revival(self, noted: Noted) -> None:
        """Before anything is heard that might end this controller as the one before."""
        self._journal.note(dataclasses.replace(noted, revivals=self._revivals))

    def _end_again(self) -> None:
        """The job had ended before this controller knew all that the one before it did."""
        phase, message, error = self.record.phase, self.record.message, self._error
        if error is None and phase is JobPhase.FAILED:
            error = RuntimeError(message)
        self.record.end(phase, error=error, return_value=self._return_value, message=message)
        if phase is JobPhase.FINISHED and self._spec.states_kept:
            self._scribe.delete_states()
        self._written = self._background.start(self._scribe.finish())

    def take_over(self, noted: Noted, told: Sequence[Introduction]) -> None:
        """Go on with the workers that the controller before this one had, as far as they live."""
        if self.record.phase.ended:
            return
        if len(self._revivals) > _MOST_REVIVALS:
            why = f"its controller died {len(self._revivals)} times within {_REVIVALS_WITHIN_S:.0f} s"
            self.finish(JobPhase.FAILED, error=RuntimeError(why))
            return
        self.group.take_over(told, noted)
        workers = self.group.machine.world_size
        reason = f"its controller was restarted; {len(told)} of {len(noted.processes)} workers are there"
        self._event(EventKind.RECOVERED, noted.world_size, workers, reason)
        if noted.preempted is not None:
            self._preemption.begin(Target(nodes={}, reason=noted.preempted), time.monotonic())
        if noted.stopping:
            self.stop()
        self._allocator.soon()

    # -- the clock ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Before the first tick: find where an earlier run of this name has stood, and make ready for workers.

        A job whose storage does not say does not start anew, which would lose what was trained; it fails. One whose
        workers train on needs nothing of what is stored before it restarts.
        """
        if self._opened:
            return
        self._opened = True
        try:
            await self._look(self._spec.elastic.storage_timeout_s)
            await self._catch_up()
        except OSError as error:
            if self.group.machine.workers:
                logger.warning("job %s: what is stored of it cannot be read: %s", self._spec.job, error)
            else:
                self.finish(JobPhase.FAILED, error=unreadable(self._spec, error))
        self._caught_up = True
        if self.record.phase.ended:
            if self.record.outcome() is None:
                self._end_again()
            return
        self._begun_after = int((self.record.resume_point or {}).get("reports", 0))
        self.feed.begin_after(self._first_report - 1 if self._first_report else self._begun_after)
        if not self.group.machine.workers:
            self.group.machine.reset(first_most=self.record.workers_at_most)

    async def _catch_up(self) -> None:
        """Go on with the files of the controller before this one."""
        if self._first_report is not None:
            for report in await self._scribe.catch_up(self._first_report):
                self.feed.put(report)

    async def written(self) -> None:
        """Once the job has ended, and what is to be written of it is, as far as storage answers."""
        if self._written is not None:
            await asyncio.wait([self._written])

    def tell_storage(self, now_s: float) -> None:
        """Some ten times a second from the beginning to the end, also before the first tick."""
        self._scribe.tick(now_s)

    def tick(self) -> None:
        """Some ten times a second until it has ended."""
        now_s = time.monotonic()
        self.group.tick(now_s)
        if self._stopping_since is not None and now_s - self._stopping_since > _STOP_GRACE_S:
            self.finish(JobPhase.STOPPED)
        if self._preemption.remind(now_s):
            self.group.post(self.group.training(), Stop(save=True))
        if why := self._preemption.failed(now_s, self.group.training()):
            self._suspend(why)
        snapshot = self._desk.due(now_s)
        if snapshot is not None:
            self._background.start(self._fit(snapshot))
        self._allocator.tick(now_s)
        self.note_down()

    async def _fit(self, snapshot: Any) -> None:
        self._change_batch(self._desk.fitted(await asyncio.to_thread(fit_snapshot, snapshot)))

    def _hear_allocator(self, answer: HeartbeatReply) -> None:
        self.record.cost_usd, self.record.note = answer.cost_usd, answer.note
        if answer.priors:
            self._change_batch(self._desk.advise(answer.priors))

    def _change_batch(self, change: tuple[BatchChoice, str] | None) -> None:
        plan = self.group.machine.current
        if change is not None and plan is not None and self.group.machine.in_flight is None:
            choice, self.record.batch_reason = change
            self.group.post([plan.members[0].worker], SetBatch(generation=plan.generation, batch=choice))

    def _view(self) -> JobView:
        return views.allocator_view(
            self._spec,
            self._desk,
            self.group.history,
            resume_point=self.record.resume_point,
            submitted_s=self._submitted_s,
            held_at=self._held_at,
            allocation=self.group.reserved(),
            may_be_stopped=self._saved and self._may_be_preempted(),
            weight=self._weight,
        )

    def _event(self, kind: EventKind, before: int, after: int, reason: str, **facts: Any) -> None:
        facts = {"generation": self.group.machine.generation} | facts
        event = JobEvent(kind=kind, time_s=time.time(), from_workers=before, to_workers=after, reason=reason, **facts)
        told = (self._spec.job, kind.value, before, after, event.pause_s, reason)
        level = logging.DEBUG if self._spec.shown else logging.INFO
        logger.log(level, "job %s: %s %d->%d workers, pause %.2f s (%s)", *told)
        self.record.event(event)
        self._journal.add(event)

    def _of_storage(self, what: str) -> None:
        """Something about storage that the job's user is to know."""
        workers = self.group.machine.world_size
        self._event(EventKind.STORAGE, workers, workers, what)

    # -- the end -----------------------------------------------------------------------------------------------

    def finish(self, phase: JobPhase, *, error: BaseException | Raised | None = None) -> None:
        """The job is over; nothing happens if it was before."""
        if self.record.phase.ended:
            return
        reason = views.explain(error, phase)
        self._event(EventKind.FINISHED, self.group.machine.world_size, 0, reason)
        self._error = error
        if self._first_report is None or self._caught_up:
            self.record.end(phase, error=error, return_value=self._return_value, message=reason)
        else:  # what the controller before this one has heard is still being read
            self.record.phase, self.record.message = phase, reason
        self.feed.close()
        self._desk.close()
        self.note_down()
        self._journal.flush(_NOTE_S)  # before anything is given back that a controller after this one would look for
        if phase is JobPhase.FINISHED and self._spec.states_kept:
            self._scribe.delete_states()
        if self.record.outcome() is not None:
            self._written = self._background.start(self._scribe.finish())
        if self._spec.trial is not None and self._spec.trial.keep_s and phase is not JobPhase.FAILED:
            self.vacated = self._background.start(self._vacate())
        else:
            self.group.disband()
            self._allocator.ended()

    async def _vacate(self) -> None:
        self.group.post_to_members(Stop())
        if (plan := self.group.machine.current) is not None:
            # Rank 0 leaves the report that it waits in; without this the others would wait for it in their next step.
            self.group.post_to_members(Cancel(generation=plan.generation))
        await self.group.vacate()
        self._allocator.ended()
