"""SHELL: one job under its controller: passes events to the pure components and carries out their decisions."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ray.background import Background
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.tuner import TunerSnapshot, fit_snapshot
from elastic_ray.events import EventKind, JobEvent, JobPhase, JobStatus, WorkerInfo
from elastic_ray.job.allocator_client import AllocatorClient
from elastic_ray.job.context import JobContext, ReportIntake
from elastic_ray.job.job_branches import JobBranches
from elastic_ray.job.journal import Journal
from elastic_ray.job.preemption import Preemption, leave_times, save_time
from elastic_ray.job.shutdown import JobShutdown, Notifier
from elastic_ray.job.starter import JobStarter
from elastic_ray.job.worker_messages import WorkerMessages
from elastic_ray.job_spec import JobSpec
from elastic_ray.membership.instructions import Note
from elastic_ray.membership.messages import BatchProposal, StopJob, StrategiesKnown
from elastic_ray.membership.roster import WorkerPhase
from elastic_ray.membership.signals import Allocated
from elastic_ray.observe.metrics.job_metrics import JobMetrics
from elastic_ray.observe.trackers.run_trackers import RunTrackers
from elastic_ray.record import views
from elastic_ray.record.controller_state import ControllerState, as_text, from_text, run_of
from elastic_ray.record.event_log import EventLog
from elastic_ray.record.losses import STUCK_FAILURES, Losses
from elastic_ray.record.record import JobRecord
from elastic_ray.record.verification import has_proof
from elastic_ray.record.worker_errors import WorkerErrors
from elastic_ray.record.writer import RecordWriter
from elastic_ray.sealed import Raised, Sealed
from elastic_ray.warm_pool.sizing import read_config
from elastic_ray.worker.messages import StateSaved, WorkerReregistration
from elastic_ray.worker_group.group import WorkerGroup
from placement.allocator.events import HeartbeatReply
from placement.cluster.jobs import JobView
from placement.knowledge.knowledge import Prior
from placement.ray_cluster.metric_writer import MetricWriter
from placement.text import count

logger = logging.getLogger("elastic_ray.job")

_STOP_GRACE_S = 10.0
_ASKED = "stop() was called"
_NOTE_S = 0.5
_REVIVALS_WITHIN_S = 300.0
_MOST_REVIVALS = 10  # a controller that dies so often does so by itself


class JobSupervisor:
    """Supervisor of a job, from submission until the job ends.

    It runs entirely in the controller's event loop, so no locks are needed.

    Args:
        background: Runner of background tasks; some of them may outlast the job.
        journal: State for the controller that Ray starts as a replacement if this process dies.
    """

    def __init__(self, spec: JobSpec, controller: Any, background: Background, journal: Journal) -> None:
        self._spec, self._journal = spec, journal
        self.record = JobRecord(spec)
        self._planner = BatchPlanner(shares_by_type=spec.scheduling.mixed_gpu_types)
        self.group = WorkerGroup(spec, controller, self.record, self._planner, background, self)
        self.events = EventLog(spec, self.record, self.group.machine, self._keep)
        self._writer = RecordWriter(spec, self.record, background, self.events.storage)
        self._trackers = RunTrackers(spec, run_of(spec), self.events.warn)
        self._metrics = JobMetrics(spec, self._planner, self.status, lambda: self.record.events, MetricWriter())
        self.reports = ReportIntake(spec, self.record, self._writer, self.events.storage, self._trackers)
        self.allocator = AllocatorClient(spec, controller, self._view, self._receive_allocation)
        self._losses = Losses(spec.max_failures, restart=spec.elastic.restart)
        self._errors = WorkerErrors(self._losses)
        self._preemption = Preemption(spec.elastic.join_timeout_s)
        parts = JobContext(
            spec=spec,
            record=self.record,
            events=self.events,
            writer=self._writer,
            planner=self._planner,
            reports=self.reports,
            group=self.group,
            background=background,
            trackers=self._trackers,
            metrics=self._metrics,
            allocator=self.allocator,
        )
        self._notifier = Notifier(spec, self.events.warn)
        self._starter, self.shutdown = JobStarter(self, parts), JobShutdown(parts, self.status, self._notifier)
        self.messages, self._batches = WorkerMessages(self, parts, self._errors), BatchChanges(parts)
        self.branches = JobBranches(parts)
        self._submitted_s, self._begin_s = time.time(), time.monotonic()
        self._held_at: int | None = None
        self._weight = spec.scheduling.weight
        self._saved = False
        self._write_s: float | None = None  # longest time that an automatic checkpoint took
        self._save_at: tuple[float, Allocated] | None = None  # when to save it, unless it is elsewhere by then
        self._stopping_since: float | None = None
        self.stop_reason, self._paused = "", ""
        self._revivals, self._claimed = tuple[float, ...](), set[int]()

    def _keep(self, event: JobEvent) -> None:
        """Pass an event to the journal and the trackers."""
        self._journal.add(event)
        self._trackers.event(event, self.group.machine.current)

    def status(self) -> JobStatus:
        """Return the job's current status."""
        known, started_for_s = (self._spec, self._planner, self.record), self.group.history.starting_s(time.monotonic())
        return views.job_status(*known, self.group.machine, self._submitted_s, time.time(), started_for_s)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the members of the current generation, in rank order."""
        seen = self.group.actors.process_infos, self.group.silence_s, self.messages.stragglers.ratios
        return views.members(self.group.machine, self.record, *seen)

    def hold(self, workers: int | None) -> None:
        """Hold the job at this number of workers; None leaves its size to the allocator.

        Raises ValueError if the number is outside the job's range, or more than the loader's batch limits can use.
        """
        if workers is not None:
            views.check_size(workers, self._spec, self._planner)
        self._held_at = workers
        self.allocator.soon()

    def weigh(self, weight: float) -> None:
        """Set how much this job's speed matters relative to other jobs, instead of ``SchedulingConfig.weight``."""
        self._weight = weight
        self.allocator.soon()

    def pause(self, reason: str) -> None:
        """Save the job after the current step and release its slots until :meth:`resume`.

        Raises ValueError if the job cannot be paused, or is already paused.
        """
        if why_not := self._why_not_paused():
            raise ValueError(f"job {self._spec.job!r} cannot be paused: {why_not}")
        self._paused = reason
        self.allocate({}, reason)
        self.allocator.soon()

    def _why_not_paused(self) -> str:
        """Return the reason why the job cannot be paused, with a remedy; empty if it can be."""
        if self.record.phase.ended:
            return f"it has ended ({self.record.phase.value})"
        if self._stopping_since is not None:
            return "it is being stopped"
        if self._paused:
            return f"it is paused already ({self._paused}); resume it with `elastic-ray resume` or JobHandle.resume()"
        if self._spec.trial is not None:
            return "it is a trial, which continues from nothing but what its sweep says; stop the trial or the sweep"
        if not self._spec.states_kept:
            return (
                "ElasticConfig(automatic_checkpoints=False) saves no state that it could continue from; "
                "leave automatic_checkpoints on, or stop the job"
            )
        if self.group.machine.in_phase(WorkerPhase.FINISHED):
            return "it is at the end of its train function"
        if self.group.machine.current is not None and self.record.waiting:
            return f"it cannot be saved now: {self.record.waiting}"
        return ""

    def resume(self) -> None:
        """Let a paused job continue once the allocator has slots for it. Raises ValueError if the job is not paused."""
        if not self._paused or self.record.phase.ended:
            raise ValueError(
                f"job {self._spec.job!r} cannot be resumed: it is not paused, it is {self.record.phase.value}"
            )
        self._paused = ""
        if self.record.phase is JobPhase.PAUSED:
            self.record.starts_again(waits_because="resumed; waiting for resources")
        self.allocator.soon()

    def stop(self, reason: str = _ASKED) -> None:
        """Stop the job after the current step, and save it if possible."""
        if self._stopping_since is None:
            self._stopping_since, self.stop_reason = time.monotonic(), reason
            self.reports.queue.close()
            if self._starter.looking or not self.group.machine.members():
                self.finish(JobPhase.STOPPED)
            elif self._can_be_saved():
                self._preemption.start(Allocated(nodes={}, reason=reason), time.monotonic())
            else:
                self.group.post_to_members(StopJob())

    def _can_be_saved(self) -> bool:
        """True if the job is training, and no rank has finished its train function or is waiting for storage."""
        trains = self.group.machine.current is not None and not self.group.machine.in_phase(WorkerPhase.FINISHED)
        return bool(self._spec.states_kept and trains and not self.record.waiting)

    def allocate(
        self,
        nodes: Mapping[str, int],
        reason: str,
        draining: Mapping[str, float] | None = None,
        *,
        nodes_may_come: bool = False,
    ) -> None:
        """Apply the allocator's decision for this job.

        Args:
            draining: Time until each node that is about to go does so [s]; 0 where that is not known.
            nodes_may_come: True if the autoscaler may get the job other nodes in place of these.
        """
        if self.record.phase.ended or self._stopping_since is not None:
            return
        if self._paused:  # the allocator may not have heard of it yet
            nodes, reason = {}, self._paused
        elif not nodes and self.record.phase is JobPhase.WAITING:
            self.record.message, self.record.needs_node = reason, False
        now_s, step_s = time.monotonic(), self._planner.latest.step_time if self._planner.latest is not None else 0.0
        leave_s = leave_times(draining or {}, now_s, change_s=self.group.machine.change_s, step_s=step_s)
        target = Allocated(nodes=nodes, reason=reason, draining=leave_s, nodes_may_come=nodes_may_come)
        waited, self._save_at = self._save_at is not None, None
        if self._starter.looking:
            self._starter.later = target
        elif self._preemption.active:
            self._preemption.adapt(target)
        elif not nodes and self._can_make_room():
            self._save_at = save_time(target, self.group.actors.reserved(), write_s=self._write_s), target
            self._save_in_time(now_s)
        else:
            self.group.take(target)
            self._record_paused()
            save_s = save_time(target, self._places(), write_s=self._write_s)
            if nodes and (save_s > now_s or waited):
                self._save_at = save_s, target

    def _places(self) -> set[str]:
        """Return the places of the group's members."""
        return {member.node for member in self.group.machine.members()}

    def _save_in_time(self, now_s: float) -> None:
        """Save a job that leaves all its nodes, once that is due, unless workers elsewhere are ready for its state."""
        if self._save_at is None or (now_s < self._save_at[0] and not self._paused):
            return
        _, then = self._save_at
        machine, places = self.group.machine, self._places()
        moved = bool(then.nodes) and not places <= then.draining.keys()
        if then.nodes and not moved:
            last_s = min((then.draining[place] for place in places), default=now_s)  # who is ready joins until then
            if machine.in_flight is not None or (now_s < last_s and machine.in_phase(WorkerPhase.READY)):
                return
        self._save_at = None
        ends = self._preemption.active or self._starter.looking or self._stopping_since is not None
        if not ends and not moved and self._can_make_room():
            self._preemption.start(then, now_s)

    def _can_make_room(self) -> bool:
        """True if the job can be saved so that it gives all its slots to others, or to nobody while it is paused."""
        return self._can_be_saved() if self._paused else self._may_be_preempted()

    def _record_paused(self) -> None:
        """Record a requested pause once the job no longer has a group."""
        if self._paused and self.group.machine.current is None and self.record.phase is not JobPhase.PAUSED:
            self.record.phase, self.record.message = JobPhase.PAUSED, self._paused

    def saved(self, message: StateSaved) -> float:
        """Record rank 0's automatic checkpoint; return the job's mean time between total losses [s]."""
        self.record.saved(message.state)
        self._write_s = max(self._write_s or 0.0, message.write_s)
        if not self._saved:
            self._saved = True
            self.allocator.soon()  # it may be stopped from now on
        return self._losses.mean_time_s(time.monotonic() - self._begin_s)

    def claim_fault(self, index: int) -> bool:
        """Claim fault ``index`` in the test's fault script; return True if it has not been claimed before."""
        fresh = index not in self._claimed
        self._claimed.add(index)
        return fresh

    def returned(self, worker: str, value: Sealed | None) -> None:
        """Store the value returned by ``worker``'s train function; rank 0's value replaces other ranks' values."""
        current = self.group.machine.current
        if current is None or current.rank_of(worker) == 0 or self.shutdown.return_value is None:
            self.shutdown.return_value = value

    def happened(self, note: Note) -> None:
        """Handle a ``note`` that a group has started to train, changed or failed; adds an event for the user."""
        self.record.clear_waiters()
        before, after, history = note.from_workers, note.to_workers, self.group.history
        started = {**history.start_detail(time.monotonic()), "owner": self._spec.owner, "metric": self._spec.metric}
        if (trial := self._spec.trial_facts) is not None:
            started["trial"] = dataclasses.asdict(trial)
        facts = {"pause_s": note.pause.pause_s, "generation": note.generation}
        detail = started if note.kind is EventKind.STARTED else note.pause.detail if note.pause.pause_s else {}
        self.events.add(note.kind, before, after, note.reason, detail={**detail, **note.detail}, **facts)
        if note.kind in (EventKind.CANCELLED, EventKind.WARNING):
            return
        if note.kind is EventKind.FAILURE:
            steps = self._planner.latest.total_steps if self._planner.latest is not None else 0
            if history.is_stuck(steps):
                stuck = "groups in a row failed without a single step; the last"
                self.finish(JobPhase.FAILED, error=RuntimeError(f"{STUCK_FAILURES} {stuck}: {note.reason}"))
                return
            self._losses.some_lost(before, after)
        history.settled(note, time.monotonic())
        self._errors.settled(started=note.kind is EventKind.STARTED)
        self.record.phase = JobPhase.RUNNING
        self.allocator.soon()

    def all_lost(self, reason: str) -> None:
        """Restart the job, or fail it, after losing all workers that held the training state."""
        if self._starter.looking:
            return
        if self._stopping_since is not None:
            self.finish(JobPhase.STOPPED)
            return
        if self.messages.torn:  # inside optimizer.step on every worker: bounded by the batch sizes that are tried
            self._starter.start_again(reason)
            return
        point = self.record.resume_point
        if not self._losses.all_lost(point.steps if point is not None else 0):
            from elastic_ray.errors import WorkersLostError  # imports ray.train, which a start must not wait for

            losses, limit = self._losses, self._spec.max_failures
            if losses.raised:
                reason += f"; workers that were lost to errors of their own before: {losses.raised}"
            lost = WorkersLostError(self._spec.job, losses.failures, limit, reason)
            self.finish(JobPhase.FAILED, error=self._errors.all_lost() or lost)
            return
        self._starter.start_again(reason)

    def complete(self) -> None:
        """Finish the job, because all ranks have left the train function."""
        last, latest = self.record.last_state, self._planner.latest
        keeps = self._spec.states_kept and self._spec.elastic.keep_last_state
        if keeps and latest is not None and (last is None or last.steps < latest.total_steps):
            which = f"the last automatic checkpoint is that of step {last.steps}" if last else "there is none"
            self.events.storage(f"what the run has ended with is not saved: {which}")
        self.finish(JobPhase.FINISHED)

    def _may_be_preempted(self) -> bool:
        """True if the job is training, no rank has finished its train function, and a save exists or is due soon."""
        if (
            not self._spec.states_kept
            or self.group.machine.current is None
            or self.group.machine.in_phase(WorkerPhase.FINISHED)
        ):
            return False
        return self._saved or self.group.history.saves_soon(time.monotonic())

    def suspend(self, why_not_saved: str) -> None:
        """Finish, restart or suspend a job whose ranks have all stopped, depending on why they stopped.

        ``why_not_saved`` is the reason why the job's state was not saved; empty if it was saved.
        """
        if self._starter.looking or self.record.phase.ended:
            return
        if not self._preemption.active:  # a worker took this controller for gone
            how = f"not saved: {why_not_saved}" if why_not_saved else "saved"
            self._starter.start_again(f"workers had not heard of this controller for too long and ended; {how}")
            return
        reason = self._preemption.reason
        if self._stopping_since is not None:
            point = self.record.resume_point
            steps = point.steps if point is not None else 0
            self.stop_reason += f"; not saved: {why_not_saved}" if why_not_saved else f"; saved at step {steps}"
            self.finish(JobPhase.STOPPED)
        elif why_not_saved:
            self._starter.start_again(f"preempted ({reason}) but not saved: {why_not_saved}")
        else:
            pause_s = self._preemption.lasted_s(time.monotonic())
            kind = EventKind.PAUSED if self._paused else EventKind.PREEMPTED
            self.events.add(kind, self.group.machine.world_size, 0, reason, pause_s=pause_s)
            self.restart_group()

    def restart_group(self) -> None:
        """Prepare the job to start with new workers after a preemption or pause, once the allocator assigns nodes."""
        self.record.clear_waiters()
        then = self._preemption.end()
        waits = then is not None and not then.nodes
        self.record.starts_again(waits_because=then.reason if then is not None and waits else None)
        self.group.restart_group(waits=waits)
        if then is not None:
            self.group.take(then)
        self._record_paused()
        self.allocator.soon()

    def journal_state(self) -> None:
        """Record the job's state in the journal, for a replacement controller."""
        machine, goal, actors = self.group.machine, self.group.goal, self.group.actors
        state = ControllerState(
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
            nodes=dict(goal.nodes),
            reason=goal.reason,
            held_at=self._held_at,
            weight=self._weight,
            **self._losses.counts,
            **self.group.history.counts,
            saved=self._saved,
            stopping=self._stopping_since is not None,
            paused=self._paused,
            critical_batch=self._planner.critical_batch,
            preempted=self._preemption.reason if self._preemption.active else None,
            processes=actors.processes(),
            homes=actors.homes(),
            pids={worker: process_info.pid for worker, process_info in actors.process_infos.items()},
            revivals=self._revivals,
            claimed=tuple(sorted(self._claimed)),
            first_report=self.record.reports.first,
            return_value=as_text(self.shutdown.return_value) if self.record.phase.ended else None,
            trackers=self._trackers.notes,
        )
        self._journal.record(state)

    def recall(self, state: ControllerState, events: tuple[JobEvent, ...]) -> None:
        """Restore the state recorded by the previous controller."""
        now_s = time.time()
        self.record.recall(JobPhase(state.phase), state.message, events)
        self._submitted_s = state.submitted_s
        self._begin_s = time.monotonic() - max(0.0, now_s - state.submitted_s)
        self._held_at, self._weight, self._saved = state.held_at, state.weight, state.saved
        self._paused = state.paused
        if state.critical_batch is not None:
            self._planner.set_critical_batch(state.critical_batch)
        self._trackers.recall(state.trackers, events)
        self._metrics.recall(len(events))
        self._losses.recall(state)
        self.group.history.recall(state, now_s)
        self._revivals = (*(at_s for at_s in state.revivals if now_s - at_s < _REVIVALS_WITHIN_S), now_s)
        self._claimed = set(state.claimed)
        self._starter.recall(state.first_report)
        self.shutdown.return_value = from_text(state.return_value)

    def journal_revival(self, state: ControllerState) -> None:
        """Record this restart of the controller before it handles a message that might crash it again."""
        self._journal.record(dataclasses.replace(state, revivals=self._revivals))

    def recover(self, state: ControllerState, told: Sequence[WorkerReregistration]) -> None:
        """Continue with the previous controller's surviving workers; fail a job whose controller dies too often."""
        if self.record.phase.ended:
            return
        if len(self._revivals) > _MOST_REVIVALS:
            why = f"its controller died {len(self._revivals)} times within {_REVIVALS_WITHIN_S:.0f} s"
            self.finish(JobPhase.FAILED, error=RuntimeError(why))
            return
        self.group.recover(told, state)
        workers = self.group.machine.world_size
        known = max(len(told), len(state.processes))  # some may have started since the last record
        reason = f"its controller was restarted; {len(told)} of {count(known)} answered"
        self.events.add(EventKind.RECOVERED, state.world_size, workers, reason, **self._unrecorded_proof(told))
        if state.preempted is not None:
            self._preemption.start(Allocated(nodes={}, reason=state.preempted), time.monotonic())
        if state.stopping:
            self.stop(state.preempted or _ASKED)
        self.allocator.soon()

    def _unrecorded_proof(self, told: Sequence[WorkerReregistration]) -> dict[str, Any]:
        """Return fields of an event with the workers' last proof, if the previous controller died before noting it."""
        newest = max(told, key=lambda each: each.switched, default=None)
        if newest is None or not newest.proof or has_proof(self.record.events, newest.proof):
            return {}
        return {"generation": newest.switched, "detail": newest.proof}

    async def open(self) -> None:
        """Find an earlier run's stored state under this name and prepare for workers; called before the first tick.

        Raises ValueError if a setting on the controller's node is invalid.
        """
        read_config(os.environ)
        await self._starter.open()

    def update_observers(self, now_s: float) -> None:
        """Update the storage writer, trackers and metrics; called about ten times a second while the job exists."""
        self._writer.tick(now_s)
        self._trackers.tick(now_s, self._planner, self.group.machine.current)
        self._metrics.tick(now_s)

    def tick(self) -> None:
        """Advance the job; called about ten times a second until it has ended."""
        now_s = time.monotonic()
        self.group.tick(now_s)
        grace = self._stopping_since is not None and not self._preemption.active
        if grace and now_s - (self._stopping_since or 0.0) > _STOP_GRACE_S:
            self.finish(JobPhase.STOPPED)
        self._save_in_time(now_s)
        if self._preemption.remind(now_s):
            self.group.actors.post(self.group.training(), StopJob(save=True))
        if why := self._preemption.failed(now_s, self.group.training()):
            self.suspend(why)
        self._batches.tick(now_s)
        self._notifier.tick(self.record.phase, self.record.message, now_s)
        self.allocator.tick(now_s)
        self.journal_state()

    def _receive_allocation(self, answer: HeartbeatReply) -> None:
        self.record.note, self.record.start_s = answer.note, answer.start_s
        self.record.cost_usd = None if answer.bill is None else answer.bill.usd
        if answer.priors:
            self._batches.advise(answer.priors)
        if answer.strategies is not None and self._planner.know(answer.strategies):
            self.group.actors.post(self.group.training(), StrategiesKnown(strategies=answer.strategies))

    def _view(self) -> JobView:
        """Return the job as the allocator sees it."""
        return views.allocator_view(
            self._spec,
            self._planner,
            self.group.history,
            resume_point=self.record.resume_point,
            submitted_s=self._submitted_s,
            held_at=self._held_at,
            paused=self._paused,
            allocation=self.group.actors.reserved(),
            may_be_stopped=self._saved and self._may_be_preempted(),
            weight=self._weight,
            slow_nodes=self.messages.stragglers.slow_nodes(time.monotonic()),
            node_failures=self._errors.failures(time.monotonic()),
        )

    def finish(self, phase: JobPhase, *, error: BaseException | Raised | None = None) -> None:
        """End the job and write its records; does nothing if it has already ended."""
        if self.record.phase.ended:
            return
        reason = views.explain(error, phase, self.stop_reason)
        detail = self.group.history.start_detail(time.monotonic())
        self.events.add(EventKind.FINISHED, self.group.machine.world_size, 0, reason, detail=detail)
        self.shutdown.record(phase, error, reason, complete=self._starter.knows_reports)
        self.reports.queue.close()
        self._planner.close()
        self.journal_state()
        self._journal.flush(_NOTE_S)  # before anything is given back that a controller after this one would look for
        self.shutdown.write()
        self.shutdown.give_back()


class BatchChanges:
    """Component that fits the batch planner's model of step times, and sends the planner's batches to rank 0."""

    def __init__(self, parts: JobContext) -> None:
        self._planner, self._group = parts.planner, parts.group
        self._record, self._background, self._events = parts.record, parts.background, parts.events

    def tick(self, now_s: float) -> None:
        """Start a fit of the step-time model if due at ``now_s`` [s, monotonic]; called about ten times a second."""
        snapshot = self._planner.due(now_s)
        if snapshot is not None:
            self._background.start(self._fit(snapshot))

    async def _fit(self, snapshot: TunerSnapshot) -> None:
        self._carry_out(self._planner.fitted(await asyncio.to_thread(fit_snapshot, snapshot)))
        if notice := self._planner.pop_notice():
            self._events.emit(EventKind.BATCH_KEPT, notice)

    def advise(self, priors: Mapping[str, Prior]) -> None:
        """Pass measurements from other jobs that train the same model, keyed by GPU type, to the batch planner."""
        self._carry_out(self._planner.advise(priors))

    def _carry_out(self, change: tuple[BatchChoice, str] | None) -> None:
        """Send the chosen batch to rank 0, unless the generation is about to change, as that also chooses the batch."""
        current = self._group.machine.current
        if change is not None and current is not None and self._group.machine.in_flight is None:
            choice, reason = change
            self._record.batch_reason = reason
            self._group.actors.post(
                [current.members[0].worker], BatchProposal(generation=current.generation, batch=choice)
            )
