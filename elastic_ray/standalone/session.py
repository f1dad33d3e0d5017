"""SHELL: sessions without a trainer: a single process, or the fixed group started by ``torchrun`` or similar."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import errno
import functools
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.batch.tuner import fit_snapshot
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.events import Pause
from elastic_ray.membership.messages import BatchProposal, ControllerMessage, GenerationSpec, Member, RankInfo
from elastic_ray.membership.worker_side import CommunicatorFactory, WorkerMembership
from elastic_ray.run.run import watch_optimizers
from elastic_ray.session.session import Session
from elastic_ray.state.progress import Link
from elastic_ray.state.resume_point import ResumePoint
from placement.text import printable

_HELD: dict[tuple[str, int], Any] = {}  # by address: it lasts as long as the process, also for later calls
_STORE_S = timedelta(seconds=2)  # neither a process that ends nor one that fails waits long for a store that is gone
_LONGEST = 1000  # anybody who reaches the store may write there
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe")


def env_store(rank: int, timeout_s: float) -> Any:
    """Return the store at ``MASTER_ADDR`` and ``MASTER_PORT``, which the group uses to form.

    ``torchrun``'s agent hosts a store and sets ``TORCHELASTIC_USE_AGENT_STORE`` to indicate this. Under ``srun``,
    ``mpirun`` and similar launchers there is no agent, so rank 0 hosts the store, on that address only.
    """
    host, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout_s)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not by_agent and (host, port) not in _HELD:
        _HELD[host, port] = _hold(host, port, timeout)
    # torch.distributed does not export its stores to type checkers; a client serves one thread at a time
    return dist.TCPStore(host, port, None, False, timeout)  # type: ignore[attr-defined]


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the network that it uses to reach ``host``."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _hold(host: str, port: int, timeout: timedelta) -> Any:
    """Host a store in this process at the address; raises RuntimeError if it cannot listen there."""
    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}  # as torch's own env:// does
    try:
        options["master_listen_fd"] = _bind(host, port).detach()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            logger.warning("MASTER_ADDR=%s is no address of rank 0's machine, so it listens at all that it has", host)
        elif error.errno != errno.EADDRINUSE:  # torch shares one that this process holds already
            raise RuntimeError(f"rank 0 cannot listen at MASTER_ADDR={host}, MASTER_PORT={port}: {error}") from error
    return dist.TCPStore(host, port, None, True, timeout, **options)  # type: ignore[attr-defined]


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address only."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


logger = logging.getLogger(__name__)
_COLLECTIVE_TIMEOUT_S = 600.0
_TRACKER_DIR = "runs/user"  # a folder named tensorboard would pass for the package where that is not installed
_FORM_TIMEOUT_S = 60.0
# How many a group has begun at its store: its ranks begin them in the same order.
_SESSIONS: collections.Counter[str] = collections.Counter()
# Between two looks at the measurements lie the steps that a decision needs, and a tenth of the time trained so far: a
# short run finds its batch early, and the fits never cost a long one more than a percent or two.
_SHORTEST_LOOK_S = 0.01
_LONGEST_LOOK_S = 2.0
_LOOK_PART = 0.1
_LOOK_STEPS = 16  # of these four are halved and two are the first at a batch
_FITS_PART = 5  # as many times what the look before took


class StandaloneController:
    """Local substitute for the controller, which logs reports and adapts the batch size with rank 0's own planner."""

    paced = False

    def __init__(self, replicas: int, post: Callable[[ControllerMessage], None]) -> None:
        self._replicas, self._post = replicas, post
        self._planner = BatchPlanner(fit_every_s=0.0)
        self._choice: BatchChoice | None = None
        self._session: weakref.ref[Session] | None = None
        self.metrics: dict[str, Any] = {}

    def measure(self, session: Session) -> None:
        """Read measurements from rank 0's ``session``, once its loader is known to adapt the batch size."""
        self._session = weakref.ref(session)  # a session that is forgotten ends the thread that looks at it

    def ready(self, loader: LoaderInfo | None, *, has_state: bool, loaded: int = 0) -> None:
        """Announce generation 1, which is the only generation of a fixed group."""
        members = tuple(Member(worker=str(rank), node=_node_of(rank)) for rank in range(self._replicas))
        spec = GenerationSpec(generation=1, members=members, reason="a group of fixed size")
        if loader is not None and not loader.limits.fixed:
            self._planner.open(loader)
            self._choice = self._planner.choose(spec)
            if self._session is not None:
                threading.Thread(target=self._poll, args=(self._session,), name="batch-tuner", daemon=True).start()
        self._post(dataclasses.replace(spec, batch=self._choice))

    def failed(self, generation: int, cause: str) -> None:
        """Do nothing, because a fixed group cannot recover; the session raises the error."""

    def switched(self, generation: int, pause: Pause, proof: Link) -> None:
        """Do nothing, because there is no controller to notify."""

    def _poll(self, reference: weakref.ref[Session]) -> None:
        """Evaluate measurements at intervals for as long as the session exists."""
        begin_s = looked_s = time.monotonic()
        took_s, looked = 0.0, 0
        while True:
            now_s = time.monotonic()
            rest_s = max(_FITS_PART * took_s, _LOOK_PART * (looked_s - begin_s)) - (now_s - looked_s)
            time.sleep(min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, rest_s)))
            session = reference()
            if session is None:
                return
            steps, now_s, report = session.progress.steps, time.monotonic(), None
            if steps - looked >= _LOOK_STEPS or (steps > looked and now_s - looked_s >= _LONGEST_LOOK_S):
                report, looked, looked_s = session.step_report(), steps, now_s
            del session  # one that is forgotten ends this thread
            if report is None:
                continue
            self.observe(report)
            took_s = time.monotonic() - now_s

    def observe(self, report: StepReport) -> None:
        """Pass a report of rank 0's measurements to the planner, and adopt the batch size that it recommends."""
        if self._choice is None or not report.steps or report.shape is None:
            return
        bound = report.memory_bound
        if bound is not None and self._choice.atomic_bsz > bound >= report.shape.atomic_bsz:
            self._choice = report.shape  # the ranks have cut it smaller by themselves
        if report.shape != self._choice:
            return
        self._planner.observe(report)
        snapshot = self._planner.due(time.monotonic())
        change = self._planner.fitted(fit_snapshot(snapshot)) if snapshot is not None else None
        if notice := self._planner.pop_notice():
            logger.info("%s", notice)
        if change is not None:
            self._choice, reason = change
            logger.info("%s", reason)
            self._post(BatchProposal(generation=1, batch=self._choice))

    def report_soon(self) -> None:
        """Do nothing, because no controller is waiting for reports."""

    def report(self, metrics: Mapping[str, Any], checkpoint: Any, resume_point: ResumePoint, index: int) -> None:
        """Log rank 0's metrics and leave the checkpoint where user code wrote it."""
        self.metrics = dict(metrics)
        shown = ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in metrics.items())
        logger.info("epoch %s: %s", resume_point.epoch, shown)

    def report_missed(self, metrics: Mapping[str, Any], resume_point: ResumePoint, index: int) -> None:
        """Do nothing, because only numbers that were logged are missing."""

    def add_files(self, checkpoint: Any, index: int) -> None:
        """Do nothing, because the checkpoint stays where user code wrote it."""

    def notify(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        """Log a message for the user."""
        logger.log(logging.INFO if kind == "strategy" else logging.WARNING, "%s", text)

    def tracker_dir(self) -> str:
        """Return ``ELASTIC_RAY_TRACKER_DIR``, or else a folder in the current directory; create it if necessary."""
        folder = os.path.abspath(os.environ.get("ELASTIC_RAY_TRACKER_DIR", _TRACKER_DIR))
        os.makedirs(folder, exist_ok=True)
        return folder

    def claim_fault(self, index: int) -> bool:
        """Return False, because scripted faults require a trainer."""
        return False


def _node_of(rank: int) -> str:
    return f"node-{rank // max(1, int(os.environ.get('LOCAL_WORLD_SIZE', '1')))}"


def session_after(earlier: Session) -> Session:
    """Release the group of ``earlier``, and return a session for another run in the same process or group."""
    assert isinstance(earlier.controller, StandaloneController), "a trainer's session serves one run"
    earlier.run.leave_group()
    earlier.membership.close(broken=False)
    earlier.group.adapt()
    return standalone_session()


def standalone_session() -> Session:
    """Return a session for this process, which joins its group under ``torchrun`` and otherwise trains alone."""
    place = _place()
    gpu = None
    if torch.cuda.is_available():
        begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        chosen = torch.cuda.current_device() if begun else 0
        local_rank = int(os.environ.get("LOCAL_RANK", place.local_rank))
        gpu = own_gpu(local_rank, chosen, torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{place.world_size}"
    at = f"{run} at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    _SESSIONS[at] += 1  # by the store: a rank that found no peers at one begins anew with them at the next
    prefix = f"elastic_ray/{run}/{_SESSIONS[at]}"
    departures = Departures(prefix, place.rank, place.world_size)
    membership = _membership(place, functools.partial(_form, prefix, departures, gpu))
    controller = StandaloneController(place.world_size, membership.post)
    session = Session(
        str(place.rank),
        membership,
        controller,
        elastic=False,
        join_timeout_s=120.0,
        expected=place,
        explain=departures.explain,
    )
    watch_optimizers()
    if place.rank == 0:
        controller.measure(session)
    return session


def own_gpu(local_rank: int, chosen: int, count: int) -> int:
    """Return the index of the GPU that this process uses: the chosen GPU, else ``local_rank`` modulo ``count``."""
    return chosen or local_rank % count


def _place() -> RankInfo:
    """Return this process's position in the group described by the environment; a group of one if none is described."""
    if "MASTER_ADDR" not in os.environ or "RANK" not in os.environ:
        return RankInfo()
    rank, world_size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    local_size = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))) if world_size > 1 else 1
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_size,
        local_world_size=min(local_size, world_size),
        node_rank=rank // local_size,
    )


def _membership(place: RankInfo, form: CommunicatorFactory) -> WorkerMembership:
    """Return this process's side of the membership protocol; if the group does not form, the run ends."""

    def give_up(generation: int, cause: str) -> None:
        membership.give_up(
            f"the group of WORLD_SIZE={place.world_size} processes did not form within {_FORM_TIMEOUT_S:g} s: {cause}. "
            "Every rank needs the same MASTER_ADDR and MASTER_PORT, the address being rank 0's, and a RANK of its own"
        )

    membership = WorkerMembership(str(place.rank), form, give_up)
    return membership


def _form(prefix: str, departures: Departures, gpu: int | None, spec: GenerationSpec, rank: int) -> Communicator:
    """Form the group's communicator; ``gpu`` is the index of the GPU that this process trains on."""
    try:
        store = env_store(rank, _FORM_TIMEOUT_S) if spec.world_size > 1 else None
    except (RuntimeError, OSError) as error:
        raise CommunicationFailedError(f"rank {rank} has found no store: {error}") from error
    if store is not None:
        departures.use(store)
    return Communicator(
        store,
        prefix,
        rank=rank,
        world_size=spec.world_size,
        timeout_s=_COLLECTIVE_TIMEOUT_S,
        form_timeout_s=_FORM_TIMEOUT_S,
        host=_own_host() if spec.nodes > 1 else "127.0.0.1",
        gpu=gpu,
    )


def _own_host() -> str:
    return address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


# All that gloo tells the others is that a connection was closed.
class Departures:
    """Record, in the group's store, of the first rank that left the group."""

    def __init__(self, prefix: str, rank: int, world_size: int) -> None:
        self._key = f"{prefix}/left"
        self._rank, self._world_size = rank, world_size
        self._store: Any = None
        self._follows = False
        self._process = os.getpid()

    def use(self, store: Any) -> None:
        """Use ``store``, where the group is about to form, and publish this rank's departure there at exit."""
        self._store = store
        atexit.register(self._leave)

    def explain(self, cause: str) -> str:
        """Return why a collective failed: the rank that left, if known, otherwise the given ``cause``."""
        self._follows = True
        if self._store is None:
            return cause
        try:
            self._store.set_timeout(_STORE_S)
            told = bytes(self._store.get(self._key)) if self._store.check([self._key]) else b""
        except RuntimeError:
            return (
                f"the group's store at {_address()} is gone: rank 0, or the launcher that held it, has left ({cause})"
            )
        if told or not any(words in cause for words in _CLOSED):
            return printable(told.decode(errors="replace")[:_LONGEST]) or cause
        who = f"rank {1 - self._rank}" if self._world_size == 2 else "a rank"
        return f"{who} has left without a word: its process was killed, or its machine is gone"

    def _leave(self) -> None:
        """Publish why this rank leaves the group, unless it ends because another rank has left."""
        if os.getpid() != self._process:
            return  # a child that was forked
        if not self._follows:
            self._publish_end()

    def _publish_end(self) -> None:
        """Publish in the store why this rank ends, unless another rank has published a reason first."""
        error = getattr(sys, "last_value", None)
        why = f"its process ends with {type(error).__name__}: {error}" if error is not None else "its process ends"
        told = f"rank {self._rank} has left: {why}"
        if error is None:
            told += ". Every rank must make the same calls (continue, break, return) in the same steps"
        try:
            self._store.set_timeout(_STORE_S)
            self._store.compare_set(self._key, "", told)
        except RuntimeError:
            return  # the store is gone before this rank


def _address() -> str:
    return f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}"
