"""SHELL: dispatch of workers' messages to the components that handle them."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ray.batch.reports import StepReport
from elastic_ray.batch.tuner import BatchDoesNotFitError
from elastic_ray.events import EventKind, JobPhase
from elastic_ray.job.context import JobContext
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.roster import WorkerPhase
from elastic_ray.membership.signals import Finished, Left, Lost, PrepareFailed, Replace, StepFailed, Switched
from elastic_ray.record.outlook import steps_to_reach
from elastic_ray.record.worker_errors import WorkerError, WorkerErrors
from elastic_ray.sealed import Raised
from elastic_ray.stragglers.detection import SlowWorker
from elastic_ray.worker.messages import (
    GroupLost,
    RunFailed,
    RunFinished,
    RunLeft,
    RunOutOfMemory,
    RunPreempted,
    RunResult,
    RunSaved,
    RunStopped,
    WorkerHeartbeat,
    WorkerMessage,
    WorkerNotice,
    WorkerOutOfMemory,
    WorkerReady,
    WorkerReport,
)
from placement.text import printable, printable_lines

if TYPE_CHECKING:
    from elastic_ray.job.supervisor import JobSupervisor

_ALLOCATOR_S = 3.0  # in which the allocator may find another node
_REMEMBER_S = 900.0  # a node that was slow is taken to be so for this long after the job has left it


class StragglerReplacement:
    """Replacement of a job's stragglers (slow workers), and record of its slow nodes.

    The allocator is informed of slow nodes and may move their workers. If it does not, a slow worker is replaced once
    on the same node, since its process or GPU may be the cause.

    Attributes:
        ratios: Time for equal work relative to the group's median, keyed by worker, from rank 0's last report.
    """

    def __init__(self, parts: JobContext) -> None:
        self._group = parts.group
        self.ratios: Mapping[str, float] = {}
        self._since_s: dict[str, float] = {}  # by worker: when its replacement was asked for
        self._wanted: dict[str, SlowWorker] = {}
        self._tried: dict[str, float] = {}  # by node: when a worker on it was replaced
        self._slow: dict[str, tuple[float, float]] = {}  # by node: ratio, and when it was slow last

    def slow_nodes(self, now_s: float) -> dict[str, float]:
        """Return the slowness of current and recent slow nodes, keyed by node id.

        Slowness is the time of the node's fastest worker for equal work / the group's median. A node counts only if all
        of the job's workers on it must be replaced, or had to be when the job left it.
        """
        return {node: ratio for node, (ratio, last_s) in self._slow.items() if now_s - last_s < _REMEMBER_S}

    def receive(self, report: StepReport, now_s: float) -> None:
        """Handle rank 0's report on current stragglers at ``now_s`` [s, monotonic]; replace workers if necessary."""
        current = self._group.machine.current
        if current is None or report.generation != current.generation:
            return
        self.ratios = {member.worker: ratio for member, ratio in zip(current.members, report.ratios, strict=False)}
        for worker, each in self._wanted.items():
            if current.rank_of(worker) is None:  # it was replaced, and has left
                self._tried[each.node] = now_s
        self._wanted = {each.worker: each for each in report.stragglers if each.replace}
        self._since_s = {worker: self._since_s.get(worker, now_s) for worker in self._wanted}
        self._record_nodes(current, report.stragglers, now_s)
        chosen = [each for worker, each in self._wanted.items() if self._may_replace(worker, current, now_s)]
        reason = "; ".join(f"in place of worker {each.worker}: {each}" for each in chosen)
        self._group.take(Replace(workers=frozenset(each.worker for each in chosen), reason=reason))

    def _record_nodes(self, current: GenerationSpec, slow: Sequence[SlowWorker], now_s: float) -> None:
        ratios = {each.worker: each.ratio for each in slow if each.replace}
        for node in {each.node for each in self._wanted.values()}:
            here = [ratios.get(member.worker, 1.0) for member in current.members if member.node == node]
            if here and min(here) > 1.0:
                self._slow[node] = min(here), now_s

    def _may_replace(self, worker: str, current: GenerationSpec, now_s: float) -> bool:
        """True if a worker may be replaced now: on another node, or for the first time on the same node."""
        node = self._wanted[worker].node
        goal: Mapping[str, int] = self._group.goal.nodes
        here = sum(1 for member in current.members if member.node == node)
        if goal.get(node, 0) < here:
            return True
        tried_s = self._tried.get(node)
        fresh = tried_s is None or now_s - tried_s > _REMEMBER_S
        return fresh and now_s - self._since_s[worker] > _ALLOCATOR_S


logger = logging.getLogger("elastic_ray.job")

_CAUSE = 300  # characters
_TRACEBACK = 8_000  # characters, from the end
_NOTICES = 100  # the last ones, among which repeated ones are found


class WorkerMessages:
    """Dispatcher of workers' messages by type."""

    def __init__(self, job: JobSupervisor, parts: JobContext, errors: WorkerErrors) -> None:
        self._job, self._errors = job, errors
        self._record, self._events, self._planner = parts.record, parts.events, parts.planner
        self._reports, self._group, self._spec = parts.reports, parts.group, parts.spec
        self._allocator = parts.allocator
        self._resumed = ""
        self._notices = collections.deque[tuple[Any, str]](maxlen=_NOTICES)
        # whether a worker is starting over that was inside an optimizer step, so that its state is of no step
        self.torn = False
        self.stragglers = StragglerReplacement(parts)  # workers that are slow

    async def receive(self, message: WorkerMessage) -> None:
        """Handle a worker's message; for a trial's report, return only once the worker may continue training."""
        if not self._group.heard(message.worker, getattr(message, "position", 0)):
            return
        match message:
            case WorkerHeartbeat():
                self._beat(message)
            case WorkerReady():
                self._ready(message)
            case StepFailed() | PrepareFailed() | Switched():
                self._group.take(message)
            case WorkerOutOfMemory():
                self._out_of_memory(message)
            case WorkerNotice(kind=kind, text=text, detail=detail) if not self._is_repeated(text, detail):
                # The status tells of slow workers that there are now.
                if kind not in (EventKind.STRAGGLER, EventKind.PASS):
                    self._record.told = text
                if kind is EventKind.OUT_OF_MEMORY:
                    text += self._memory_advice()
                self._events.emit(kind, text, detail=detail)
                if detail.get("request", {}).get("kind") == "Pause" and not detail["refused"]:
                    self._pause(text)
            case WorkerReport():
                await self._reports.receive(message, self._group.machine.world_size)

    def _pause(self, reason: str) -> None:
        """Pause the job at the request of an adaptation policy; if that is not possible, inform the user."""
        try:
            self._job.pause(reason)
        except ValueError as error:
            self._record.told = str(error)
            self._events.warn(str(error))

    def _is_repeated(self, text: str, detail: Mapping[str, Any]) -> bool:
        """True if a numbered notice is a repeat: a new rank 0 sends its predecessor's last notice after a failure."""
        notice = detail.get("number"), text
        known = notice[0] is not None and notice in self._notices
        self._notices.append(notice)
        return known

    def _beat(self, message: WorkerHeartbeat) -> None:
        self._group.beat(message)
        self._record.waits(message.worker, "" if message.ending else message.waits)
        if message.gpu_memory is not None:
            self._record.gpu_memory[message.worker] = message.gpu_memory
        if message.report is not None:
            self._observe(message.report)

    def _observe(self, report: StepReport) -> None:
        """Handle rank 0's report on its steps; inform the allocator at once if the number of wanted workers changed."""
        wish = self._planner.wish
        before = self._planner.observe(report)
        if self._planner.wish != wish:
            self._allocator.soon()
        if before is not None:
            efficiency = self._planner.efficiency
            detail = {"from_batch_size": before, "to_batch_size": report.batch_size, "efficiency": efficiency}
            replicas = report.replicas
            held = f"batch {report.held_batch}: set by a policy" if report.held_batch is not None else ""
            self._events.add(EventKind.BATCH, replicas, replicas, held or self._record.batch_reason, detail=detail)
        goal, current = steps_to_reach(self._record.events), self._group.machine.current
        if goal and current is not None and report.generation == current.generation and report.total_steps >= goal:
            self._events.emit(EventKind.CAUGHT_UP, f"step {goal} is reached again", detail={"steps": goal})
        self.stragglers.receive(report, time.monotonic())

    def _ready(self, message: WorkerReady) -> None:
        """Handle a worker that has built its model; the job fails if its loader cannot divide batches as configured."""
        resumed = message.resumed
        if resumed and resumed != self._resumed and self._group.machine.current is None:
            self._resumed = resumed
            self._events.add(EventKind.RESUMED, 0, 0, resumed)
        if message.loader is not None and self._spec.scheduling.mixed_gpu_types:
            try:
                message.loader.check_shares(self._spec.min_workers)
            except ValueError as error:
                if self._group.machine.is_newcomer(message.worker):
                    self._lose(message.worker, error, newcomer=True, trained=False)
                else:
                    self._job.finish(JobPhase.FAILED, error=error)
                return
        if self._planner.loader is None:
            self._allocator.soon()  # which may know of the model
        self._planner.open(message.loader)
        self._group.take(message)

    def _memory_advice(self) -> str:
        """Return a clause about the declared memory need, for a failure message; empty if none is declared."""
        need = self._spec.scheduling.memory
        return "" if need is None else f"; {need.after_failure(max(1, self._group.machine.world_size))}"

    def _out_of_memory(self, message: WorkerOutOfMemory) -> None:
        """Restart the worker with smaller batches or equal shares for all; fail the job if the batch cannot shrink."""
        advice = self._memory_advice()
        try:
            reason = self._planner.out_of_memory(message.atomic_bsz, more_than_equal=message.more_than_equal)
        except BatchDoesNotFitError as error:
            self._job.finish(JobPhase.FAILED, error=BatchDoesNotFitError(f"{error}{advice}"))
            return
        self._events.emit(EventKind.OUT_OF_MEMORY, reason + advice)
        self.torn = not message.has_state
        self._group.take(message)
        self.torn = False

    def run_ended(self, worker: str, result: RunResult) -> None:
        """Handle the result of a train function: it returned, left, saved, lost its group, or raised an error."""
        trains = self._group.machine.current is not None
        match result:
            case RunFinished(steps=steps) if (error := self._errors.at_end(steps)) is not None:
                self._job.finish(JobPhase.FAILED, error=error)
            case RunFinished(value=value, rank=rank, steps=steps):
                self._job.returned(worker, value)
                self._group.take(Finished(worker=worker, rank=rank, steps=steps))
            case RunLeft():
                self._group.take(Left(worker=worker))
            case RunStopped():
                self._job.finish(JobPhase.STOPPED)
            case RunPreempted():
                pass  # rank 0 saves the job
            case RunSaved(problem=problem) if worker in self._group.machine.workers:
                self._job.suspend(problem)
            case RunSaved():
                pass  # of workers that the job has given back since
            case GroupLost(cause=cause):
                self._group.take(Lost(worker=worker, cause=cause))
            case RunOutOfMemory(cause=cause) if trains:  # the others continue without it
                self._group.take(Lost(worker=worker, cause=f"out of memory before it could join: {cause}"))
            case RunFailed():  # RunOutOfMemory is one
                self._raised(worker, result)

    def _raised(self, worker: str, result: RunFailed) -> None:
        """Handle an error of the train function: lose only that worker, unless the error must end the job."""
        machine, now_s = self._group.machine, time.monotonic()
        record = machine.workers.get(worker)
        if record is None:
            logger.info("job %s: worker %s, which it has given back, raised %s", self._spec.job, worker, result.error)
            return
        if record.phase is WorkerPhase.LEAVING:  # what its code does on the way out costs nobody anything
            text = f"worker {worker} raised while it left: {printable(str(result.error).strip()[-_CAUSE:])}"
            self._events.emit(EventKind.WARNING, text)
            self._group.take(Left(worker=worker))
            return
        error = WorkerError(
            worker=worker, node=record.node, steps=result.steps, origin=result.origin, raised=result.error
        )
        newcomer = not result.trained and machine.is_newcomer(worker)
        if newcomer:
            joined = record.phase is WorkerPhase.MEMBER
            verdict = self._errors.of_newcomer(error, joined=joined, now_s=now_s)
        elif not result.trained and machine.current is None and not record.has_state:
            verdict = self._errors.of_start(
                error, beside=machine.workers, nodes=self._allocator.nodes, wanted=machine.target_workers
            )
        else:
            verdict = self._errors.of_member(error, others_train=self._group.others_train(worker), now_s=now_s)
        if verdict.ends is not None:
            logger.info("job %s: the error of worker %s ends it: %s", self._spec.job, worker, verdict.reason)
            self._job.finish(JobPhase.FAILED, error=verdict.ends)
            return
        # What may be called once a process (set_start_method, torch.library.define) raises the second time.
        reused = newcomer and result.reused
        blames = verdict.blames_node and not reused
        of_device = error.origin is not None and error.origin.of_node
        told = {"newcomer": newcomer, "trained": result.trained, "reused": reused, "of_device": of_device}
        self._lose(worker, result.error, blames=blames, **told)

    def _lose(
        self,
        worker: str,
        error: BaseException | Raised | None,
        *,
        newcomer: bool,
        trained: bool,
        reused: bool = False,
        of_device: bool = False,
        blames: bool = True,
    ) -> None:
        """Continue without a worker whose train function raised.

        Args:
            newcomer: True if the worker was joining a group; each such failure delays the next joiner longer.
            trained: True if the worker had trained a step.
            reused: True if its process had run the train function before; the node is then not at fault.
            of_device: True if the error names a disk or a GPU of the node.
            blames: True if the node may be the cause.
        """
        record = self._group.machine.workers.get(worker)
        node = record.node if record is not None else ""
        text = error.traceback_text if isinstance(error, Raised) else f"{type(error).__name__}: {error}"
        cause = printable(text.strip().rsplit("\n", 1)[-1])
        detail = {"worker": worker, "node": node, "traceback": printable_lines(text)[-_TRACEBACK:]}
        told = f"joiner {worker} is given up" if newcomer else f"worker {worker} on node {node[:8]} is lost"
        kind = EventKind.CANCELLED if newcomer else EventKind.WARNING
        again = ", in a process that had run the function before; the next one is a fresh one" if reused else ""
        self._events.emit(kind, f"{told}, it raised {cause}{again}", detail=detail)
        if blames:
            now_s = time.monotonic()
            self._errors.record(node, worker, cause, starting=not trained, of_device=of_device, now_s=now_s)
        self._group.take(Lost(worker=worker, cause=f"it raised {cause}", newcomer=newcomer and not reused))
