"""SHELL: the worker that runs the user's train function in one process, several times if necessary."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import ActorDiedError

from elastic_ray.checkpoints.automatic import CorruptStateError
from elastic_ray.checkpoints.object_store import fetched_checkpoint
from elastic_ray.checkpoints.sharded.reading import open_checkpoint
from elastic_ray.communication.bootstrap_store import BootstrapStore
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.communication.retired_communicators import RetiredCommunicators
from elastic_ray.communication.unit_group import UnitCommunicator, UnitGroup, UnitLostError
from elastic_ray.events import EventKind, JobEvent
from elastic_ray.faults import FaultInjector
from elastic_ray.membership.messages import ControllerMessage, GenerationSpec, StopJob
from elastic_ray.membership.worker_side import LostGroupError, WorkerMembership
from elastic_ray.run.current import WorkerDismissed, set_worker_session
from elastic_ray.run.registry import HookPoint
from elastic_ray.run.run import watch_optimizers
from elastic_ray.sealed import seal, seal_error
from elastic_ray.session.default_group import install as install_default_group
from elastic_ray.session.default_group import install_unit, uninstall_unit
from elastic_ray.session.session import Session
from elastic_ray.state.progress import RunProgress, in_no_generation
from elastic_ray.state.resume_point import SavedState, StartingPoint
from elastic_ray.steps.out_of_memory import is_out_of_memory, let_go
from elastic_ray.steps.random_numbers import seed_alike
from elastic_ray.worker import train_loop
from elastic_ray.worker.actor_controller_client import (
    CONTROLLER_ENDED,
    ActorControllerClient,
    ControllerCaller,
    HeartbeatThread,
)
from elastic_ray.worker.controller_watchdog import ControllerWatchdog, Registration
from elastic_ray.worker.error_origin import origin_of
from elastic_ray.worker.messages import (
    GroupLost,
    RunEnd,
    RunFailed,
    RunFinished,
    RunLeft,
    RunOutOfMemory,
    RunPreempted,
    RunResult,
    RunSaved,
    RunStopped,
    WorkerReregistration,
)
from elastic_ray.worker.setup import Assignment, ProcessInfo, WorkerSetup
from elastic_ray.worker.state_saver import StateSaver
from elastic_ray.worker.stored_train_loop import stored_train_loop
from elastic_ray.worker.warm_up import resident_bytes
from placement.cluster.cluster import DOMAIN_LABEL, GPU_TYPE_LABEL
from placement.ray_cluster import groups
from placement.text import first_line, log_plainly

logger = logging.getLogger(__name__)

_BEATS_PER_TIMEOUT = 4
_RERUNS = 8
_TRACKER_S = 10.0  # for what the train function has logged itself, where storage is not local
_REGROUP_S = 30.0  # of a controller that has come back

_End = TypeVar("_End", bound=RunEnd)


class Worker:
    """Worker inside a ``WorkerProcess``. While :meth:`run` is in progress, the other methods can still be called."""

    def __init__(self, setup: WorkerSetup) -> None:
        log_plainly(logging.WARNING)
        logging.getLogger("elastic_ray").setLevel(setup.log_level)
        self._setup = setup
        self._membership: WorkerMembership | None = None
        self._token = ""
        self._assignment: Assignment | None = None
        self._link: ActorControllerClient | None = None
        self._process_info: ProcessInfo | None = None
        self._ended = threading.Condition()
        self._result: tuple[str, str, RunResult] | None = None
        self._runs = 0
        self._unit: UnitGroup | None = None
        self._retired = RetiredCommunicators()
        self.saves_alone = False  # whether a run saves itself whose controller is gone for good
        self._host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._watchdog = ControllerWatchdog(
            self._introduce,
            self._report_again,
            self._give_back,
            self._save_alone,
            timeout_s=setup.elastic.controller_timeout_s,
        )
        self._watchdog.watch(self._idle)

    @property
    def _idle(self) -> Registration | None:
        """Registration of the process between two runs; None for a process lent by a sweep, which the sweep ends."""
        setup = self._setup
        return Registration(controller=setup.controller, token=setup.token) if setup.controller is not None else None

    def prepare(self) -> ProcessInfo:
        """Apply the job's settings to this process, and return the facts about it that the controller needs."""
        torch.set_num_threads(max(1, int(self._setup.cpus)))
        cuda = self._setup.use_gpu and torch.cuda.device_count() > 0
        labels = ray.get_runtime_context().get_node_labels()
        gpu_type, domain = (str(labels.get(label, "")) for label in (GPU_TYPE_LABEL, DOMAIN_LABEL))
        self._process_info = ProcessInfo(pid=os.getpid(), cuda=cuda, gpu_type=gpu_type, domain=domain)
        return self._process_info

    def post(self, token: str, worker: str, message: ControllerMessage) -> None:
        """Deliver a message from the controller to the run with this token; drop the message if that run has ended."""
        membership = self._membership
        if membership is not None and (self._token, membership.worker) == (token, worker):
            membership.post(message)

    def run(self, assignment: Assignment) -> None:
        """Run the train function until it returns or fails, or until the worker leaves or loses its group."""
        self._assignment, self._link, self._result = assignment, None, None
        self._runs += 1
        # A sweep's process is registered only while it runs for the controller.
        self._watchdog.watch(
            Registration(controller=assignment.controller, token=assignment.token, worker=assignment.worker)
        )
        try:
            groups.hold(assignment.group)
        except Exception as error:  # the control store is away: the group is kept for as long as one of no process
            logger.warning("job %s: the use of its slot was not noted: %s", assignment.job, error)
        try:
            result = self._run(assignment)
        except BaseException as error:  # a bug of ours must end the run with its reason, not leave it hanging
            logger.exception("job %s: a run failed outside its train function", assignment.job)
            result = _end(RunFailed, error=RuntimeError(f"{type(error).__name__}: {first_line(error)}"))
        with self._ended:
            self._result = (assignment.token, assignment.worker, result)
            self._ended.notify_all()

    def outcome(self, token: str, worker: str, wait_s: float) -> RunResult | None:
        """Return how a run ended, or None if it has not ended within ``wait_s`` [s]; may be called again."""

        def result() -> RunResult | None:
            found = self._result
            return found[2] if found is not None and found[:2] == (token, worker) else None

        with self._ended:
            self._ended.wait_for(lambda: result() is not None, timeout=wait_s)
            found = result()
        if found is not None and self._setup.controller is None:
            self._watchdog.watch(None)  # it goes back to the sweep
        return found

    def _introduce(self) -> WorkerReregistration | None:
        """Return this worker's registration for a restarted controller, or None if no run is in progress."""
        assignment, link, process_info, membership = self._assignment, self._link, self._process_info, self._membership
        if assignment is None or link is None or process_info is None:
            return None
        return WorkerReregistration(
            worker=assignment.worker,
            token=assignment.token,
            node=assignment.node,
            group=assignment.group,
            actor=ray.get_runtime_context().current_actor,
            process=ray.get_runtime_context().get_actor_name() or "",
            lent=self._setup.controller is None,
            process_info=process_info,
            spec=membership.current if membership is not None else None,
            switched=link.last_switched,
            pause=link.pause,
            proof=link.proof,
            ready=link.last_ready,
            failed=link.last_failed,
            starts_over=link.starts_over,
            position=assignment.unit.position if assignment.unit is not None else 0,
        )

    def _report_again(self) -> None:
        link = self._link
        if link is not None:
            link.report_again()

    def _save_alone(self, why: str) -> None:
        """Save the run after the current step if possible, because the controller is gone for good."""
        link, membership = self._link, self._membership
        if link is None or membership is None or self._result is not None or not self._setup.states_kept:
            return
        self.saves_alone = True
        link.gone = why
        membership.post(StopJob(save=True))
        limit_s, since_s = self._setup.elastic.storage_timeout_s, time.monotonic()
        with self._ended:  # as long as storage takes pieces, the state is on its way
            while self._result is None and time.monotonic() - max(since_s, link.calls.heard_s) < limit_s:
                self._ended.wait(0.2)
        self.saves_alone = False

    def _give_back(self) -> None:
        assignment = self._assignment
        if assignment is not None and assignment.group:
            groups.release(groups.find(assignment.group))

    def _run(self, assignment: Assignment) -> RunResult:
        """Run the train function, and again after it runs out of memory; return how the last run ended."""
        torch.set_num_threads(max(1, int(self._setup.cpus)))
        if assignment.gpu_ids:
            # Before CUDA is initialised in this process; afterwards such a process is not lent again.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, assignment.gpu_ids))
        self._membership, self._token = None, assignment.token
        link = self._link = ActorControllerClient(assignment, self._setup)
        progress = _start_of(assignment)
        kept, source = self._saved_state(assignment, link)
        try:
            self._unit = self._unit_of(assignment)
        except UnitLostError as error:
            return _end(GroupLost, cause=str(error))
        with fetched_checkpoint(assignment.checkpoint_ref) as checkpoint:
            left, bound = _RERUNS, None
            while left:
                saved = SavedState(states=kept, path=source) if kept is not None else None
                session = self._session(assignment, link, progress, saved, checkpoint)
                kept = saved = None  # the session's alone, which lets go of it once it is taken over
                outcome = self._run_once(assignment, session, link)
                if isinstance(outcome, RunEnd):
                    return outcome
                (kept, progress), source = outcome, ""
                # A bound that has fallen is progress, and ends at the smallest batch, with an error of its own.
                left = _RERUNS if session.progress.memory_bound != bound else left - 1
                bound = session.progress.memory_bound
        text = f"the train function ran out of memory {_RERUNS} times in a row, with the same bound on samples"
        return _end(RunFailed, error=RuntimeError(text))

    def _unit_of(self, assignment: Assignment) -> UnitGroup | None:
        """Return the group of the worker's unit once all its processes have joined; None for a single process."""
        if assignment.unit is None:
            return None
        elastic = self._setup.elastic
        place, timeout_s = assignment.unit, elastic.join_timeout_s + elastic.collective_timeout_s
        if place.store:
            return UnitGroup(place, cuda=bool(assignment.gpu_ids), timeout_s=timeout_s)
        caller = ControllerCaller(assignment, 0)
        store = BootstrapStore(caller, timeout_s, rank=place.position, world_size=place.size)
        store.publish_at_once()
        store.stay_open()  # for groups that user code makes later
        return UnitGroup(place, cuda=bool(assignment.gpu_ids), timeout_s=timeout_s, store=store, host=self._host)

    def _saved_state(self, assignment: Assignment, link: ActorControllerClient) -> tuple[dict[str, Any] | None, str]:
        """Return the first intact automatic checkpoint to resume from, and its path; None and "" if none is intact."""
        unusable = ""
        for state in assignment.states:
            try:
                kept = open_checkpoint(link.storage, state)
            except CorruptStateError as error:
                logger.warning("job %s: an automatic checkpoint is not used: %s", assignment.job, error)
                unusable += f"; not from a later one, for {error}"
                continue
            kept["run"] = in_no_generation(kept["run"])
            link.start_from(f"from the automatic checkpoint at step {state.steps}{unusable}")
            return kept, state.path
        link.start_from(unusable.removeprefix("; "))
        return None, ""

    def _run_once(
        self, assignment: Assignment, session: Session, link: ActorControllerClient
    ) -> RunResult | tuple[dict[str, Any] | None, RunProgress | None]:
        """Run the train function once; return the result or, if it ran out of memory, the inputs for a rerun."""
        elastic = self._setup.elastic
        interval_s = elastic.heartbeat_timeout_s / _BEATS_PER_TIMEOUT
        heartbeats = HeartbeatThread(link, session, interval_s=interval_s, report_s=elastic.report_interval_s)
        set_worker_session(session)
        if self._unit is None:
            install_default_group()
        else:
            install_unit(self._unit)
        watch_optimizers()
        saver = self._new_saver(assignment, session, link)
        seed_alike(assignment.job)
        broken = False
        try:
            stored = assignment.stored_train_loop
            value = train_loop.call(stored_train_loop(stored)[0] if stored else assignment.train_loop)
            saves = saver is not None and elastic.keep_last_state
            if session.finish(saves=saves) and saver is not None:
                saver.save_last(until=lambda: session.membership.stop_requested)
            link.flush()
            return _end(RunFinished, value=seal(value), rank=session.rank, steps=session.progress.loader_steps)
        except WorkerDismissed as dismissed:
            if dismissed.stopped and session.preempted:
                return _preempted(session, link, saver)
            return _end(RunStopped) if dismissed.stopped else _end(RunLeft)
        except (LostGroupError, CommunicationFailedError, UnitLostError) as error:
            broken = True
            return _end(GroupLost, cause=str(error))
        except BaseException as error:
            broken = True
            samples, more = session.samples_beyond_memory(error), session.takes_more(error)
            starts_over = samples > 0 and session.synced and self._unit is None
            if starts_over and not more:
                session.progress.bound_memory(samples, session.run.least_samples())
            kept = session.keep_state() if starts_over else None
            if kept is None and not starts_over:
                raised = seal_error(error, rank=session.group.rank_info.rank, node=self._host)
                origin, steps = origin_of(error), session.progress.loader_steps
                if is_out_of_memory(error) and not session.synced:
                    return _end(RunOutOfMemory, error=raised, origin=origin, cause=first_line(error))
                where = {"origin": origin, "trained": session.has_trained, "steps": steps, "reused": self._runs > 1}
                return _end(RunFailed, error=raised, **where)
            logger.warning("job %s rank %d: %s", assignment.job, session.rank, error)
            let_go(error)
            link.out_of_memory(samples, first_line(error), whole=not session.ledger.updating, more_than_equal=more)
            if kept is not None:
                return kept
            progress = _start_of(assignment) or RunProgress()  # half of an optimizer step is no state: others have one
            progress.limit_memory(session.progress.memory_bound)
            return None, progress
        finally:
            set_worker_session(None)
            session.registry.loaders.close()
            session.run.leave_group()
            if saver is not None:
                saver.close()
            session.membership.close(broken=broken)
            heartbeats.stop()
            if self._unit is not None:
                uninstall_unit(self._unit)
            link.tracker_files.close(_TRACKER_S)

    def _new_saver(self, assignment: Assignment, session: Session, link: ActorControllerClient) -> StateSaver | None:
        """Return a saver of automatic checkpoints for a run, or None if the job makes none."""
        if not self._setup.states_kept:
            return None
        elastic = self._setup.elastic
        saver = StateSaver(
            session,
            link.storage,
            link.saved,
            calls=link.calls,
            keep=self._setup.states_kept,
            interval_s=elastic.checkpoint_interval_s,
            timeout_s=elastic.storage_timeout_s,
            saving=session.registry.saving,
            workers=lambda: tuple(member.worker for member in session.group.members),
        )
        session.registry.saves = saver.is_due
        session.registry.add_hook(HookPoint.BETWEEN_STEPS, saver.between_steps)
        session.registry.add_hook(HookPoint.CHECKPOINT_ASKED, saver.ask)
        return saver

    def _session(
        self,
        assignment: Assignment,
        link: ActorControllerClient,
        progress: RunProgress | None,
        saved: SavedState | None,
        checkpoint: Any,
    ) -> Session:
        """Return a session for one run, with a new membership and the state to resume from."""
        elastic = self._setup.elastic

        def form(spec: GenerationSpec, rank: int) -> Communicator:
            caller = ControllerCaller(assignment, spec.generation)

            def called_off() -> bool:
                return membership.is_void(spec.generation)

            unit = self._unit
            make = Communicator if unit is None else functools.partial(UnitCommunicator, unit)
            return make(
                BootstrapStore(
                    caller, elastic.switch_timeout_s, rank=rank, world_size=spec.world_size, called_off=called_off
                ),
                f"generation/{spec.generation}" + (f"/{unit.place.position}" if unit is not None else ""),
                rank=rank,
                world_size=spec.world_size,
                timeout_s=elastic.collective_timeout_s,
                form_timeout_s=elastic.switch_timeout_s,
                host=self._host,
                gpu=0 if assignment.gpu_ids else None,  # the process sees no others
                secret=assignment.secret,
                called_off=called_off,
            )

        self._membership = WorkerMembership(assignment.worker, form, link.could_not_form, self._retired, hears=True)
        membership = self._membership
        link.is_stopping = lambda: membership.stop_requested
        return Session(
            assignment.worker,
            membership,
            link,
            progress=progress,
            saved=saved,
            fixed_batch=elastic.fixed_batch,
            join_timeout_s=24 * 3600.0,  # the controller decides when a joiner is given up
            # Only the controller announces generations, and it may be away.
            regroup_timeout_s=max(elastic.switch_timeout_s * 3, elastic.controller_timeout_s + _REGROUP_S),
            faults=FaultInjector(elastic.faults, link.claim_fault) if elastic.faults else None,
            job=assignment.job,
            expected=assignment.expected,
            unit=self._unit,
            stragglers=elastic.straggler_config,
            start=StartingPoint(
                checkpoint or _stored_checkpoint(assignment, link),
                epoch=assignment.resume_point.epoch if assignment.resume_point is not None else 0,
                others_at=assignment.others_at,
                has_state=saved is not None,
            ),
            sizes=assignment.sizes,
        )


def _stored_checkpoint(assignment: Assignment, link: ActorControllerClient) -> Any:
    """Return the reported checkpoint to start from, or None at the start of a run."""
    if assignment.checkpoint is None:
        return None
    from ray.train import Checkpoint

    return Checkpoint(assignment.checkpoint, link.storage.filesystem)


def _start_of(assignment: Assignment) -> RunProgress | None:
    point = assignment.resume_point
    return RunProgress.from_resume_point(point) if point is not None else None


def _end(kind: type[_End], **values: Any) -> _End:
    """Return the end of a run, with the resources that its process currently uses."""
    memory, cuda = resident_bytes(), bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return kind(memory_bytes=memory, cuda_used=cuda, **values)


def _preempted(session: Session, link: ActorControllerClient, saver: StateSaver | None) -> RunResult:
    """Save a preempted run: rank 0 saves the common state, or each rank its part."""
    if session.rank != 0 or not session.run.speaks:
        problem = saver.save() if saver is not None else ""
        if problem:  # rank 0 waits for this rank's part in vain, and tells of it
            logger.warning("job %s rank %d: %s", session.job, session.rank, problem)
        return _end(RunPreempted)
    try:
        link.flush()
    except ActorDiedError:  # the controller may have ended already
        link.gone = CONTROLLER_ENDED
    problem = "automatic checkpoints are off" if saver is None else saver.save()
    if link.gone:
        _write_end(session, link, problem)
    return _end(RunSaved, problem=problem)


def _write_end(session: Session, link: ActorControllerClient, problem: str) -> None:
    """Append the final event in place of the controller, which is gone."""
    saved = f"not saved: {problem}" if problem else f"saved at step {session.progress.steps}"
    event = JobEvent(
        time_s=time.time(),
        kind=EventKind.FINISHED,
        from_workers=session.world_size,
        to_workers=0,
        reason=f"the workers have ended the job: {link.gone}; {saved}",
    )
    try:
        link.storage.events.append([event.to_json()])
    except Exception as error:
        logger.warning("job %s: %s; this event was not written: %s", session.job, event.reason, error)
