"""SHELL: client that a worker uses to reach its job's controller, even while Ray restarts the controller."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.checkpoints.object_store import put_checkpoint
from elastic_ray.checkpoints.reported import CheckpointNote, ReportedCheckpoints
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.tracker_files import TrackerFiles
from elastic_ray.communication.bootstrap import BootstrapCall, call_mac
from elastic_ray.events import EventKind, Pause
from elastic_ray.membership.signals import PrepareFailed, StepFailed, Switched
from elastic_ray.run.current import WorkerDismissed
from elastic_ray.state.progress import Link
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.steps.out_of_memory import gpu_memory
from elastic_ray.worker.messages import (
    StateSaved,
    WorkerHeartbeat,
    WorkerMessage,
    WorkerNotice,
    WorkerOutOfMemory,
    WorkerReady,
    WorkerReport,
)
from elastic_ray.worker.setup import Assignment, WorkerSetup
from placement.ray_cluster.named_actors import insist
from placement.storage.storage_calls import StorageCalls

if TYPE_CHECKING:
    from elastic_ray.session.session import Session

logger = logging.getLogger(__name__)

_ANSWER_S = 60.0  # a call that Ray holds back for a controller's next process is not refused meanwhile
_SOONEST_S = 0.1  # between beats that are not to wait
_MOST_UNHEARD = 500  # about a second of a controller's time
_POLL_S = 0.1
_PAUSE_S = 2e-3
CONTROLLER_ENDED = "its controller has ended"
_MOST_REPORTED = 2000
_ON_THE_WAY_S = 2.0
_UNWRITTEN_S = 20.0  # a controller writes reports every ten seconds at the latest


class ActorControllerClient:
    """Connection of a session to its job's controller; most calls return without waiting for an answer."""

    def __init__(self, assignment: Assignment, setup: WorkerSetup) -> None:
        self._controller = assignment.controller
        self._worker = assignment.worker
        self._position = assignment.unit.position if assignment.unit is not None else 0
        self.storage = RunStorage(
            assignment.storage_path, setup.storage_filesystem, private=setup.elastic.private_files
        )
        self.calls = StorageCalls(self.storage.where)
        self.tracker_files = TrackerFiles(self.storage)
        # The other ranks wait in a collective meanwhile, and must not take this one for lost.
        timeout_s = min(setup.elastic.storage_timeout_s, setup.elastic.collective_timeout_s / 2)
        self._checkpoints = ReportedCheckpoints(self.storage, self.calls, timeout_s=timeout_s)
        # asked while a checkpoint is stored: true if the job must stop now
        self.is_stopping: Callable[[], bool] = lambda: False
        self._patience_s = setup.elastic.controller_timeout_s
        self.paced = setup.paced
        self._unheard: dict[int, tuple[WorkerMessage, Any]] = {}
        self._sent = 0
        self._reported: collections.deque[tuple[float, WorkerReport | WorkerNotice]] = collections.deque(
            maxlen=_MOST_REPORTED
        )
        self._lock = threading.Lock()
        self._resumed = ""
        self.wanted = threading.Event()  # a heartbeat with rank 0's account, now
        self.last_ready: WorkerReady | None = None
        self.last_failed: StepFailed | None = None
        self.last_switched = 0
        self.pause = Pause()
        self.proof: Mapping[str, Any] = {}
        self.starts_over = False
        self.gone = ""  # why the controller will never answer again, so that nothing waits for it; empty while it may
        # path of the checkpoint of the last report; None if it had none, or storage has not taken it
        self.stored: str | None = None

    @property
    def follows(self) -> bool:
        """True if this process belongs to a multi-process worker (a unit) and another process reports for it."""
        return bool(self._position)

    def start_from(self, resumed: str) -> None:
        """Set the automatic checkpoint that the run resumes from, or the reason why it cannot, for :meth:`ready`."""
        self._resumed = resumed

    def saved(self, message: StateSaved) -> float:
        """Report an automatic checkpoint, and return the job's mean time between losses of all its workers [s]."""
        if not self.gone:
            try:
                return float(insist(lambda: self._controller.saved.remote(message), timeout_s=_ANSWER_S))
            except ActorDiedError:
                self.gone = CONTROLLER_ENDED
        return math.inf

    def push(self, message: WorkerMessage) -> Any:
        """Send a message without waiting; if the controller dies before reading it, reregistration replaces it."""
        return self._controller.push.remote(message)

    def _is_mute(self, message: WorkerMessage) -> bool:
        """True if another process in the worker's unit sends this message on behalf of all of them."""
        return bool(self._position) and not isinstance(message, WorkerHeartbeat | StepFailed | PrepareFailed)

    def out_of_memory(self, atomic_bsz: int, cause: str, *, whole: bool, more_than_equal: bool) -> None:
        """Report that this worker ran out of memory and reruns with fewer samples; ``whole`` if its state is kept."""
        self.starts_over, self.last_switched = whole, 0
        self.last_ready = self.last_failed = None
        self.insist_on(
            WorkerOutOfMemory(
                worker=self._worker,
                atomic_bsz=atomic_bsz,
                cause=cause,
                has_state=whole,
                more_than_equal=more_than_equal,
            )
        )

    def insist_on(self, message: WorkerMessage) -> None:
        """Send a message that must not be lost: :meth:`repeat` resends it until it has arrived.

        Returns at once, unless too many messages are in flight. In that case the call waits for the controller, which
        slows down a loop that reports too fast.
        """
        if self.gone or self._is_mute(message):
            return
        deadline_s = time.monotonic() + self._patience_s
        while len(self._unheard) >= _MOST_UNHEARD and time.monotonic() < deadline_s:
            self.repeat()
            time.sleep(_PAUSE_S)
        with self._lock:
            self._sent += 1
            self._unheard[self._sent] = (message, self.push(message))

    def report_again(self) -> None:
        """Resend recent reports and proofs of passes, which the previous controller may not have written to storage."""
        now_s = time.monotonic()
        for told_s, told in tuple(self._reported):
            if now_s - told_s < _UNWRITTEN_S and not self._is_mute(told):
                if isinstance(told, WorkerReport):
                    told = dataclasses.replace(told, checkpoint_ref=None, again=True)
                self.push(told)

    def repeat(self) -> bool:
        """Resend messages that were lost with a controller; return True if all have arrived. Thread-safe.

        Raises RayError if the controller will not come back.
        """
        with self._lock:
            if not self._unheard:
                return True
            references = [reference for _, reference in self._unheard.values()]
            answered, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
            done = set(answered)
            for number, (message, reference) in tuple(self._unheard.items()):
                if reference not in done:
                    continue
                try:
                    ray.get(reference)
                    del self._unheard[number]
                except ActorUnavailableError:
                    self._unheard[number] = (message, self.push(message))
                except ActorDiedError:
                    raise
                except RayTaskError as error:  # it was heard, and could not be dealt with: nor could it be again
                    del self._unheard[number]
                    logger.warning("the controller could not take a message: %s", error)
            return not self._unheard

    def flush(self) -> None:
        """Wait until every report has arrived, so that the run's end cannot overtake a report.

        Raises RayError if the controller will not come back, and TimeoutError if it does not come back in time.
        """
        deadline_s = time.monotonic() + self._patience_s
        while not self.gone and not self.repeat():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the job's controller has not taken a report within {self._patience_s:g} s")
            time.sleep(_POLL_S)

    def ready(self, loader: LoaderInfo | None, *, has_state: bool, loaded: int = 0) -> None:
        self.last_ready = WorkerReady(
            worker=self._worker, loader=loader, has_state=has_state, loaded=loaded, resumed=self._resumed
        )
        if not self._is_mute(self.last_ready):
            self.push(self.last_ready)

    def failed(self, generation: int, cause: str) -> None:
        self.last_failed = StepFailed(worker=self._worker, generation=generation, cause=cause)
        self.push(self.last_failed)

    def switched(self, generation: int, pause: Pause, proof: Link) -> None:
        self.last_failed, self.last_switched, self.pause, self.starts_over = None, generation, pause, False
        self.proof = proof.detail
        told = Switched(worker=self._worker, generation=generation, pause=pause, proof=self.proof)
        if not self._is_mute(told):
            self.push(told)

    def could_not_form(self, generation: int, cause: str) -> None:
        """Report that the group of an announced generation could not be formed; ``cause`` is a sentence."""
        self.push(PrepareFailed(worker=self._worker, generation=generation, cause=cause))

    def beat(self, *, report: StepReport | None, at: tuple[int, int] | None = None, ending: bool = False) -> None:
        """Send a heartbeat with rank 0's ``report`` and the position ``at``, (generation, step); ``ending`` if last."""
        waits = "" if ending else self.calls.waiting()
        beat = WorkerHeartbeat(
            worker=self._worker,
            report=report,
            at=at,
            ending=ending,
            waits=waits,
            gpu_memory=gpu_memory(),
            position=self._position,
        )
        sent = self.push(beat)
        if ending and report is not None:  # else the run's result may overtake it: a finished job at 59 of 60 epochs
            ray.wait([sent], timeout=_ON_THE_WAY_S)

    def report_soon(self) -> None:
        self.wanted.set()

    def report(self, metrics: Mapping[str, Any], checkpoint: Any, resume_point: ResumePoint, index: int) -> None:
        path, reference, problem = None, None, ""
        if checkpoint is not None:
            note = CheckpointNote(resume_point=resume_point, metrics=metrics)
            path, problem = self._checkpoints.store(checkpoint, index, note, self.is_stopping)
            if path and self.paced and not self.storage.local:  # only a trial's is wanted by others while it lives
                reference = put_checkpoint(checkpoint)
        self.stored = path
        message = WorkerReport(
            worker=self._worker,
            index=index,
            metrics=metrics,
            checkpoint=path,
            resume_point=resume_point,
            checkpoint_ref=reference,
            problem=problem,
        )
        self._reported.append((time.monotonic(), message))
        if self.gone:
            return
        if self.paced:  # answered after as long as the sweep's scheduler takes to decide
            if not insist(lambda: self.push(message), timeout_s=None, patience_s=self._patience_s):
                raise WorkerDismissed(stopped=True)
            return
        self.insist_on(message)
        if path is not None:
            self.flush()  # a restart must find the checkpoint, even if this process dies in its next step

    def report_missed(self, metrics: Mapping[str, Any], resume_point: ResumePoint, index: int) -> None:
        self.insist_on(
            WorkerReport(
                worker=self._worker,
                index=index,
                metrics=metrics,
                checkpoint=None,
                resume_point=resume_point,
                again=True,
            )
        )

    def add_files(self, checkpoint: Any, index: int) -> None:
        problem = self._checkpoints.add(checkpoint, index, self.is_stopping)
        if problem:
            self.notify(EventKind.WARNING.value, problem, {"number": index})

    def notify(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        logger.log(logging.DEBUG if kind == EventKind.PASS else logging.WARNING, "%s", text)
        message = WorkerNotice(worker=self._worker, kind=EventKind(kind), text=text, detail=detail)
        if message.kind is EventKind.PASS:
            self._reported.append((time.monotonic(), message))
        self.insist_on(message)

    def tracker_dir(self) -> str:
        return self.tracker_files.folder()

    def claim_fault(self, index: int) -> bool:
        return bool(insist(lambda: self._controller.claim_fault.remote(index), timeout_s=_ANSWER_S))


class HeartbeatThread:
    """Thread that sends heartbeats to the controller until the run ends."""

    def __init__(self, link: ActorControllerClient, session: Session, *, interval_s: float, report_s: float) -> None:
        self._link, self._session, self._interval_s = link, session, interval_s
        self._every = max(1, round(report_s / interval_s))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        """Send heartbeats until the run ends, and immediately whenever a report is requested."""
        count = 0
        while True:
            wanted = self._link.wanted.wait(self._interval_s)
            if self._stop.wait(_SOONEST_S if wanted else 0.0):  # a policy may change its mind in every step
                return
            if wanted:
                self._link.wanted.clear()
            count += 1
            session = self._session
            report = self._report() if wanted or count % self._every == 0 else None
            spec = session.group.generation_spec
            at = (spec.generation, session.progress.loader_steps) if spec is not None else None
            try:
                self._link.beat(report=report, at=at)
                self._link.repeat()
            except RayError as error:  # its controller is gone for good: the watchdog ends this process
                logger.info("a message was not delivered: %s", error)
            except Exception:  # the next beat may come through
                logger.exception("a beat failed")

    def _report(self) -> StepReport | None:
        """Return rank 0's measurements, or None on other ranks and if measuring fails."""
        session = self._session
        if session.rank != 0 or self._link.follows or not session.synced:
            return None
        try:
            return session.step_report()
        except Exception:  # heartbeats must continue whatever a measurement runs into
            logger.exception("the step report failed")
            return None

    def stop(self) -> None:
        """Send a final heartbeat with the run's progress, then stop and join the thread."""
        self._link.beat(report=self._report(), ending=True)
        self._stop.set()
        self._link.wanted.set()
        self._thread.join(timeout=5.0)


class ControllerCaller:
    """Client for the controller's bootstrap method, which members of a new generation use to exchange values."""

    def __init__(self, assignment: Assignment, generation: int) -> None:
        self._controller = assignment.controller
        self._worker = assignment.worker
        self._generation = generation
        self._mac = call_mac(assignment.secret, generation, assignment.worker)
        self._told: list[Any] = []

    def notify(self, values: Mapping[str, bytes]) -> None:
        """Publish values to the other members without waiting; if they are refused, the next :meth:`ask` raises."""
        self._told.append(self._call(tells=values))

    def ask(self, keys: tuple[str, ...], wait_s: float, tells: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Publish ``tells``, wait up to ``wait_s`` [s] for all ``keys`` to be known, and return all known values.

        Raises RuntimeError if the controller does not answer, or refuses the call.
        """
        try:
            call = self._call(tells=tells, wants=keys, wait_s=wait_s)
            known: Mapping[str, bytes] = ray.get(call, timeout=wait_s + _ON_THE_WAY_S)
        except RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RuntimeError(f"its controller does not connect it to the other workers: {lines[-1]}") from error
        return known

    def _call(self, **fields: Any) -> Any:
        call = BootstrapCall(generation=self._generation, worker=self._worker, mac=self._mac, **fields)
        return self._controller.bootstrap.remote(call)
