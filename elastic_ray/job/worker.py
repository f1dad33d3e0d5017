"""SHELL: the worker actor: runs the user's train function, again and again, in one process."""

from __future__ import annotations

import gc
import logging
import os
import resource
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import ray
import torch

from elastic_ray.context import set_session
from elastic_ray.faults import FaultInjector
from elastic_ray.job import train_loop
from elastic_ray.job.bootstrap_caller import ControllerCaller
from elastic_ray.job.held import held, hold
from elastic_ray.job.messages import (
    Assignment,
    Beat,
    ProcessFacts,
    RunResult,
    StateSaved,
    WorkerCouldNotForm,
    WorkerFailed,
    WorkerMessage,
    WorkerOutOfMemory,
    WorkerReady,
    WorkerReport,
    WorkerSetup,
    WorkerSwitched,
)
from elastic_ray.job.state_saver import StateSaver
from elastic_ray.link import LoaderInfo, StepReport
from elastic_ray.membership.bootstrap_store import BootstrapStore
from elastic_ray.membership.plan import Message, Plan
from elastic_ray.membership.rendezvous import CommunicationFailedError, Communicator, Graveyard
from elastic_ray.membership.worker_side import LostGroupError, Membership
from elastic_ray.parallel.saved_state import read_state
from elastic_ray.passage import WorkerDismissed
from elastic_ray.run_progress import RunProgress
from elastic_ray.session import Session
from elastic_ray.state_files import CorruptStateError
from elastic_ray.storage import RunStorage
from placement.cluster import GPU_TYPE_LABEL

logger = logging.getLogger(__name__)

_BEATS_PER_TIMEOUT = 4
_RERUNS = 8


class ControllerLink:
    """A session's link to its job controller; every call but ``report`` returns at once."""

    def __init__(self, assignment: Assignment, setup: WorkerSetup) -> None:
        self._controller = assignment.controller
        self._worker = assignment.worker
        self._storage = RunStorage(assignment.storage_path, setup.storage_filesystem)
        self._paced = setup.paced
        self._last_report: Any = None
        self.resumed = ""

    def saved(self, message: StateSaved) -> float:
        """Tell of an automatic checkpoint, and wait for the answer: the mean time between losses of the job [s]."""
        return float(ray.get(self._controller.saved.remote(message), timeout=10.0))

    def push(self, message: WorkerMessage) -> Any:
        """Send a message; with a controller that is gone this process is ended, so nobody waits here."""
        return self._controller.push.remote(self._worker, message)

    def flush(self) -> None:
        """Wait until the last report has arrived: the end of the run must not overtake it."""
        if self._last_report is not None:
            ray.get(self._last_report, timeout=10.0)

    def ready(self, loader: LoaderInfo | None, *, has_state: bool) -> None:
        self.push(WorkerReady(loader=loader, has_state=has_state, resumed=self.resumed))

    def failed(self, generation: int, cause: str) -> None:
        self.push(WorkerFailed(generation=generation, cause=cause))

    def switched(self, generation: int, pause_s: float) -> None:
        self.push(WorkerSwitched(generation=generation, pause_s=pause_s))

    def observe(self, report: StepReport) -> None:
        self.push(Beat(report=report))

    def report(self, metrics: Mapping[str, Any], checkpoint: Any, resume_point: Mapping[str, Any], index: int) -> None:
        path = kept = None
        if checkpoint is not None:
            stored = self._storage.persist_checkpoint(checkpoint, index, progress=resume_point, metrics=metrics)
            path = stored.path
            if self._paced and not self._storage.local:  # only a trial's is wanted by others while it lives
                kept = hold(checkpoint)
        self._last_report = self.push(
            WorkerReport(index=index, metrics=metrics, checkpoint=path, resume_point=resume_point, held=kept)
        )
        if self._paced:
            if not ray.get(self._last_report):  # after as long as the sweep's scheduler takes to decide
                raise WorkerDismissed(stopped=True)
        elif path is not None:
            self.flush()  # a restart must find the checkpoint, even if this process dies in its next step

    def claim_fault(self, index: int) -> bool:
        return bool(ray.get(self._controller.claim_fault.remote(index), timeout=10.0))


class Heart:
    """Beats to the controller from a thread of its own while a run lasts."""

    def __init__(self, link: ControllerLink, session: Session, *, interval_s: float, report_s: float) -> None:
        self._link = link
        self._session = session
        self._interval_s = interval_s
        self._every = max(1, round(report_s / interval_s))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(self._interval_s):
            count += 1
            session = self._session
            report = self._report() if count % self._every == 0 else None
            plan = session.membership.current
            at = (plan.generation, session.progress.ticks) if plan is not None else None
            self._link.push(Beat(report=report, at=at))

    def _report(self) -> StepReport | None:
        session = self._session
        if session.rank != 0 or not session.synced:
            return None
        try:
            return session.step_report()
        except Exception:  # the heart must beat on whatever a measurement runs into
            logger.exception("the step report failed")
            return None

    def stop(self) -> None:
        """Stop and join; the last report shows how far the run has come."""
        self._link.push(Beat(ending=True, report=self._report()))
        self._stop.set()
        self._thread.join(timeout=5.0)


class Worker:
    """What a ``WorkerProcess`` does; methods other than ``run`` return at once and may be called while it runs.

    Args:
        setup: what all workers of the job share.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("elastic_ray").setLevel(setup.log_level)
        self._setup = setup
        self._membership: Membership | None = None
        self._token = ""
        self._graveyard = Graveyard()
        self._host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def prepare(self) -> ProcessFacts:
        """Do what the first step would otherwise wait for: torch's libraries, threads, and autograd."""
        torch.set_num_threads(max(1, int(self._setup.cpus)))
        weight = torch.ones(8, 8, requires_grad=True)
        (torch.ones(8, 8) @ weight).sum().backward()  # type: ignore[no-untyped-call]
        torch.optim.SGD([weight], lr=0.0).step()  # the first optimizer of a process imports half of torch's compiler
        cuda = self._setup.use_gpu and torch.cuda.device_count() > 0
        labels = ray.get_runtime_context().get_node_labels()
        return ProcessFacts(pid=os.getpid(), cuda=cuda, gpu_type=str(labels.get(GPU_TYPE_LABEL, "")))

    def post(self, token: str, worker: str, message: Message) -> None:
        """A message of the controller to one run; one that comes too late finds another, or none."""
        membership = self._membership
        if membership is not None and (self._token, membership.worker) == (token, worker):
            membership.post(message)

    def run(self, assignment: Assignment) -> RunResult:
        """Run the train function until it returns, leaves, fails or its group is lost."""
        torch.set_num_threads(max(1, int(self._setup.cpus)))
        if assignment.gpu_ids:
            # Before CUDA is initialised in this process; afterwards such a process is not lent again.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, assignment.gpu_ids))
        self._membership, self._token = None, assignment.token
        link = ControllerLink(assignment, self._setup)
        progress = RunProgress.from_resume_point(dict(assignment.resume_point)) if assignment.resume_point else None
        kept, source = self._saved_state(assignment, link)
        with held(assignment.held) as checkpoint:
            for _ in range(_RERUNS):
                session = self._session(assignment, link, progress, kept, source)
                session.checkpoint = checkpoint or session.checkpoint
                outcome = self._run_once(assignment, session, link)
                if isinstance(outcome, RunResult):
                    return outcome
                (kept, progress), source = outcome, ""
        return _result("error", error=RuntimeError(f"the train function ran out of memory {_RERUNS} times in a row"))

    def _saved_state(self, assignment: Assignment, link: ControllerLink) -> tuple[dict[str, Any] | None, str]:
        """The first good one of the automatic checkpoints to go on from, and its path."""
        storage = RunStorage(assignment.storage_path, self._setup.storage_filesystem)
        unusable = ""
        for state in assignment.states:
            try:
                kept = read_state(storage, state)
            except CorruptStateError as error:
                logger.warning("job %s: an automatic checkpoint is not used: %s", assignment.job, error)
                unusable += f"; not from a later one, for {error}"
                continue
            kept["run"] |= {"lineage": 0, "slot": 0}  # generations are counted anew
            link.resumed = f"from the automatic checkpoint at step {state.steps}{unusable}"
            return kept, state.path
        link.resumed = unusable.removeprefix("; ")
        return None, ""

    def _run_once(
        self, assignment: Assignment, session: Session, link: ControllerLink
    ) -> RunResult | tuple[dict[str, Any], RunProgress]:
        """One run; what a rerun needs when the run went out of memory."""
        elastic = self._setup.elastic
        interval_s = elastic.heartbeat_timeout_s / _BEATS_PER_TIMEOUT
        heart = Heart(link, session, interval_s=interval_s, report_s=elastic.report_interval_s)
        set_session(session)
        saver = self._new_saver(assignment, session, link)
        broken = False
        try:
            value = train_loop.call(assignment.train_loop)
            session.finish()
            link.flush()
            return _result("finished", value=value)
        except WorkerDismissed as dismissed:
            if dismissed.stopped and session.agreement.preempted and not session.agreement.stop:
                return _preempted(session, link, saver)
            return _result("stopped" if dismissed.stopped else "left")
        except (LostGroupError, CommunicationFailedError) as error:
            broken = True
            return _result("lost", cause=str(error))
        except BaseException as error:
            broken = True
            kept = session.keep_state() if _is_out_of_memory(error) and session.atomic_bsz else None
            if kept is None:
                from elastic_ray.errors import TrainFunctionError  # imports ray.train, which a start must not wait for

                wrapped = TrainFunctionError.from_exception(error, rank=session.rank, node=self._host)
                joining = _is_out_of_memory(error) and not session.synced
                return _result("no room" if joining else "error", error=wrapped, cause=_first_line(error))
            logger.warning("job %s rank %d: %s", assignment.job, session.rank, error)
            atomic_bsz = session.atomic_bsz
            _let_go(error)
            link.push(WorkerOutOfMemory(atomic_bsz=atomic_bsz, cause=_first_line(error)))
            return kept
        finally:
            set_session(None)
            if saver is not None:
                saver.close()
            session.membership.close(broken=broken)
            heart.stop()

    def _new_saver(self, assignment: Assignment, session: Session, link: ControllerLink) -> StateSaver | None:
        if not self._setup.states_kept:
            return None
        storage = RunStorage(assignment.storage_path, self._setup.storage_filesystem)
        saver = StateSaver(
            session,
            storage,
            link.saved,
            keep=self._setup.states_kept,
            interval_s=self._setup.elastic.checkpoint_interval_s,
        )
        session.between_steps.append(saver.between_steps)
        return saver

    def _session(
        self,
        assignment: Assignment,
        link: ControllerLink,
        progress: RunProgress | None,
        kept: dict[str, Any] | None,
        source: str,
    ) -> Session:
        elastic, setup = self._setup.elastic, self._setup

        def form(plan: Plan, rank: int) -> Communicator:
            caller = ControllerCaller(assignment, plan.generation)
            return Communicator(
                BootstrapStore(caller, elastic.switch_timeout_s, rank=rank, world_size=plan.world_size),
                f"generation/{plan.generation}",
                rank=rank,
                world_size=plan.world_size,
                timeout_s=elastic.collective_timeout_s,
                form_timeout_s=elastic.switch_timeout_s,
                host=self._host,
                cuda=bool(assignment.gpu_ids),
                secret=assignment.secret,
            )

        def could_not_form(generation: int, cause: str) -> None:
            link.push(WorkerCouldNotForm(generation=generation, cause=cause))

        self._membership = Membership(assignment.worker, form, could_not_form, self._graveyard)
        session = Session(
            assignment.worker,
            self._membership,
            link,
            progress=progress,
            kept=kept,
            kept_from=source,
            join_timeout_s=24 * 3600.0,  # the controller decides when a joiner is given up
            regroup_timeout_s=elastic.switch_timeout_s * 3,
            faults=FaultInjector(elastic.faults, link.claim_fault) if elastic.faults else None,
            job=assignment.job,
        )
        if assignment.checkpoint is not None:
            from ray.train import Checkpoint

            storage = RunStorage(assignment.storage_path, setup.storage_filesystem)
            session.checkpoint = Checkpoint(assignment.checkpoint, storage.filesystem)
        return session


def _result(kind: str, **values: Any) -> RunResult:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RunResult(kind=kind, memory_bytes=memory, cuda_used=_cuda_used(), **values)


def _preempted(session: Session, link: ControllerLink, saver: StateSaver | None) -> RunResult:
    """The job goes on another time: rank 0 saves what all ranks hold."""
    if session.rank != 0:
        return _result("preempted")
    link.flush()
    return _result("saved", cause="automatic checkpoints are off" if saver is None else saver.save())


def _cuda_used() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator raises a plain RuntimeError
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def _let_go(error: BaseException) -> None:
    """Free what the failed run's frames hold, activations above all."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    gc.collect()
    if _cuda_used():
        torch.cuda.empty_cache()
