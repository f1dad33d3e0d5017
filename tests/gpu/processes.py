"""A job without Ray whose workers are processes on one device: they join, leave and are killed while they train.

Each has a host of its own in NCCL's eyes, so that they form NCCL groups on one GPU. The parent is their controller.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_ray.membership.messages import Cancel, GenerationSpec, Member
from elastic_ray.run.controller_client import ControllerClient

SILENT_S = 0.75  # without a sign of life a worker is lost
SIGN_S = 0.05
NOTICE_S = 1.0  # after the first news of a failure, all get another group
_CALL_S = 5.0


def nccl_environment(worker: int) -> None:
    """What NCCL reads in a process before its first call: a host of its own, reached by TCP."""
    os.environ.update(
        NCCL_HOSTID=f"h{os.getpid()}-{worker}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket", NCCL_IB_DISABLE="1"
    )


class _Caller:
    """A worker's way to the others of a generation: through its pipe."""

    def __init__(self, child: _Child, generation: int) -> None:
        self._child, self._generation = child, generation

    def notify(self, values: Mapping[str, bytes]) -> None:
        self._child.say("meet", 0, self._generation, dict(values), (), 0.0)

    def ask(self, keys: tuple[str, ...], wait_s: float, tells: Mapping[str, bytes]) -> Mapping[str, bytes]:
        answer = self._child.expect()
        self._child.say("meet", answer.number, self._generation, dict(tells), keys, wait_s)
        if not answer.there.wait(wait_s + _CALL_S):
            raise RuntimeError("the controller does not answer")
        if isinstance(answer.value, str):
            raise RuntimeError(answer.value)
        found: Mapping[str, bytes] = answer.value
        return found


@dataclasses.dataclass(slots=True)
class _Answer:
    number: int
    there: threading.Event = dataclasses.field(default_factory=threading.Event)
    value: Any = None


class _Child(ControllerClient):
    """What runs in a worker's process; takes the place of its controller's client and of its scripted faults."""

    paced = False

    def __init__(self, pipe: Any, worker: int, secret: str) -> None:
        self._pipe, self._worker, self._secret = pipe, worker, secret
        self._saying = threading.Lock()
        self._answers: dict[int, _Answer] = {}
        self._number = 0
        self._armed: tuple[str, int] | None = None  # moment, and signal
        self.membership: Any = None
        self.leaving = False

    def say(self, *words: Any) -> None:
        with self._saying:
            self._pipe.send(words)

    def expect(self) -> _Answer:
        with self._saying:
            self._number += 1
            self._answers[self._number] = _Answer(self._number)
            return self._answers[self._number]

    def listen(self) -> None:
        """Until the parent is gone."""
        try:
            while True:
                kind, *rest = self._pipe.recv()
                if kind == "post":
                    self.membership.post(*rest)
                elif kind == "answer":
                    answer = self._answers.pop(rest[0])
                    answer.value = rest[1]
                    answer.there.set()
                elif kind == "arm":
                    self._armed = (rest[0], rest[1])
                elif kind == "finish":
                    self.leaving = True
        except (EOFError, OSError):
            os._exit(1)

    def live(self) -> None:
        while True:
            self.say("alive")
            time.sleep(SIGN_S)

    def at(self, moment: str, *, worker: str, rank: int, step: int) -> None:
        if moment == "after_step":
            self.say("applied", step + 1)
        if self._armed is not None and self._armed[0] == moment:
            self.say("strikes", moment)
            number, self._armed = self._armed[1], None
            os.kill(os.getpid(), number)

    # -- as a controller's client --------------------------------------------------------------------------------------

    def ready(self, loader: Any, *, has_state: bool, loaded: int = 0) -> None:
        self.say("ready")

    def failed(self, generation: int, cause: str) -> None:
        self.say("failed", generation, cause)

    def switched(self, generation: int, pause: Any, proof: Any) -> None:
        self.say("switched", generation, dataclasses.asdict(pause))

    def report_soon(self) -> None: ...

    def report(self, metrics: Any, checkpoint: Any, resume_point: Any, index: int) -> None: ...

    def report_missed(self, metrics: Any, resume_point: Any, index: int) -> None: ...

    def add_files(self, checkpoint: Any, index: int) -> None:
        raise NotImplementedError

    def notify(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        self.say("told", kind, text)

    def tracker_dir(self) -> str:
        raise NotImplementedError

    def claim_fault(self, index: int) -> bool:
        return False


_child: _Child | None = None


def asked_to_finish() -> bool:
    """Whether the parent wants the job to end; rank 0's word counts."""
    assert _child is not None
    return _child.leaving


def _main(
    pipe: Any, worker: int, secret: str, train: Callable[..., Any], arguments: tuple[Any, ...], gpu: bool, form_s: float
) -> None:
    global _child
    nccl_environment(worker)
    import torch

    from elastic_ray.authentication import MAC_BYTES  # noqa: F401  # what is imported here is in no step's time
    from elastic_ray.communication.bootstrap_store import BootstrapStore
    from elastic_ray.communication.communicator import Communicator
    from elastic_ray.membership.worker_side import WorkerMembership
    from elastic_ray.run.current import WorkerDismissed, set_session
    from elastic_ray.session.session import Session

    torch.set_num_threads(1)
    child = _child = _Child(pipe, worker, secret)

    def form(spec: GenerationSpec, rank: int) -> Communicator:
        def called_off() -> bool:
            return child.membership.is_void(spec.generation)

        begin_s = time.monotonic()
        store = BootstrapStore(
            _Caller(child, spec.generation), form_s, rank=rank, world_size=spec.world_size, called_off=called_off
        )
        made = Communicator(
            store,
            f"generation/{spec.generation}",
            rank=rank,
            world_size=spec.world_size,
            timeout_s=20.0,
            form_timeout_s=form_s,
            host="127.0.0.1",
            gpu=0 if gpu else None,
            secret=secret,
            called_off=called_off,
        )
        child.say("formed", spec.generation, time.monotonic() - begin_s, made._nccl is not None)
        return made

    def could_not(generation: int, cause: str) -> None:
        child.say("unformed", generation, cause)

    child.membership = WorkerMembership(f"w{worker}", form, could_not)
    if gpu:
        torch.zeros(1, device="cuda")
    faults: Any = child
    session = Session(f"w{worker}", child.membership, child, faults=faults, regroup_timeout_s=60.0)
    threading.Thread(target=child.listen, daemon=True).start()
    threading.Thread(target=child.live, daemon=True).start()
    set_session(session)
    try:
        result = train(*arguments)
        session.finish()
        child.say("result", result, _memory(torch) if gpu else (0, 0))
    except WorkerDismissed:
        child.say("left")
    except BaseException as error:
        child.say("error", f"{type(error).__name__}: {error}")
    os._exit(0)  # groups go with the process


def _memory(torch: Any) -> tuple[int, int]:
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@dataclasses.dataclass(slots=True)
class Worker:
    """The parent's view of one."""

    number: int
    process: Any
    pipe: Any
    ready: threading.Event = dataclasses.field(default_factory=threading.Event)
    formed: set[int] = dataclasses.field(default_factory=set)
    generation: int = 0  # entered
    entered_s: float = 0.0
    steps: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # that it has applied, and when
    seen_s: float = 0.0
    silent: bool = False
    over: str = ""
    result: Any = None
    memory: tuple[int, int] = (0, 0)


class ProcessJob:
    """The controller of some processes that run ``train(*arguments)``.

    Args:
        controller: of their bootstrap.
        train: importable, as its arguments are.
        gpu: they train on GPU 0.
        form_s: longest wait for a group to form.
        silent_s: a worker that gives no sign of life for so long is lost.
    """

    def __init__(
        self,
        controller: Any,
        train: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        gpu: bool,
        form_s: float = 15.0,
        silent_s: float = SILENT_S,
    ) -> None:
        self._silent_s = silent_s
        self._controller, self._train, self._arguments, self._gpu, self._form_s = (
            controller,
            train,
            tuple(arguments),
            gpu,
            form_s,
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([train.__module__, "elastic_ray.session.session"])
        self.workers: dict[int, Worker] = {}
        self.members: tuple[int, ...] = ()
        self.generation = 0
        self.news = threading.Condition()
        self.log: list[str] = []
        self.pauses: list[tuple[bool, dict[str, Any]]] = []  # whether the change was planned; of members that stay
        self._planned: set[int] = set()
        self.forming_s: list[float] = []
        self.over_nccl: set[bool] = set()
        self.struck: set[int] = set()
        self._failed: set[tuple[int, int]] = set()
        self._suspected_s = 0.0  # when a member wanted another group, and no worker was known to be lost
        self._begin_s = time.monotonic()

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self._begin_s:8.3f} {text}")

    def start(self, number: int) -> Worker:
        """Start a worker; it builds its model and waits."""
        mine, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_main,
            args=(theirs, number, self._controller.secret, self._train, self._arguments, self._gpu, self._form_s),
            daemon=True,
        )
        process.start()
        theirs.close()
        worker = self.workers[number] = Worker(number, process, mine, seen_s=time.monotonic() + 60.0)
        threading.Thread(target=self._receive, args=(worker,), daemon=True).start()
        return worker

    def _receive(self, worker: Worker) -> None:
        from elastic_ray.communication.bootstrap import BootstrapCall, call_mac

        sending = threading.Lock()

        def answer(number: int, future: Any) -> None:
            try:
                value = future.result()
            except Exception as error:
                value = f"{type(error).__name__}: {error}"
            if number:
                with sending:
                    self.send(worker, "answer", number, value)

        try:
            while True:
                kind, *rest = worker.pipe.recv()
                worker.seen_s = max(worker.seen_s if worker.ready.is_set() else 0.0, time.monotonic())
                if kind == "meet":
                    number, generation, tells, wants, wait_s = rest
                    name = f"w{worker.number}"
                    call = BootstrapCall(
                        generation=generation,
                        worker=name,
                        mac=call_mac(self._controller.secret, generation, name),
                        tells=tells,
                        wants=wants,
                        wait_s=wait_s,
                    )
                    self._controller.call(call).add_done_callback(lambda f, n=number: answer(n, f))
                elif kind != "alive":
                    self._take(worker, kind, rest)
        except (EOFError, OSError):
            pass
        with self.news:
            worker.over = worker.over or "gone"
            self.note(f"w{worker.number} {worker.over}")
            self.news.notify_all()

    def send(self, worker: Worker, *words: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone
            worker.pipe.send(words)

    def _take(self, worker: Worker, kind: str, rest: list[Any]) -> None:
        with self.news:
            if kind == "applied":
                worker.steps.append((rest[0], time.monotonic()))
            else:
                self.note(f"w{worker.number} {kind} {' '.join(str(each) for each in rest)[:300]}")
            if kind == "ready":
                worker.ready.set()
            elif kind == "formed":
                worker.formed.add(rest[0])
                self.forming_s.append(rest[1])
                self.over_nccl.add(rest[2])
            elif kind == "switched":
                worker.generation, worker.entered_s = rest[0], time.monotonic()
                if sum(rest[1][part] or 0.0 for part in ("vote_s", "group_s", "state_s")):
                    self.pauses.append((rest[0] in self._planned, rest[1]))
            elif kind == "strikes":
                self.struck.add(worker.number)
            elif kind == "result":
                worker.over, worker.result, worker.memory = "done", rest[0], rest[1]
            elif kind == "left":
                worker.over = "left"
            elif kind == "error":
                worker.over = f"error: {rest[0]}"
            elif kind in ("failed", "unformed") and (rest[0] == self.generation or self.generation in self._planned):
                self._suspected_s = self._suspected_s or time.monotonic()
            self.news.notify_all()

    def announce(self, members: Sequence[int], *, void: bool) -> int:
        """Tell everybody of the next group."""
        with self.news:
            told = dict.fromkeys((*self.members, *members))
            self.generation += 1
            self._suspected_s = 0.0
            if not void:
                self._planned.add(self.generation)
            self.members = tuple(members)
            self.note(f"generation {self.generation}: {self.members}{' void' if void else ''}")
            spec = GenerationSpec(
                generation=self.generation,
                members=tuple(Member(worker=f"w{each}", node="here") for each in members),
                void_below=self.generation if void else 0,
            )
            for each in told:
                if not self.workers[each].over:
                    self.send(self.workers[each], "post", spec)
            return self.generation

    def cancel(self, generation: int, members: Sequence[int]) -> None:
        """Call a planned generation off; these continue."""
        with self.news:
            self.note(f"generation {generation} is cancelled")
            told = dict.fromkeys((*self.members, *members))
            self.members = tuple(members)
            for each in told:
                self.send(self.workers[each], "post", Cancel(generation=generation))

    def wait(self, until: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait; members that are lost meanwhile are left out of the group, as the controller does."""
        deadline = time.monotonic() + seconds
        while True:
            with self.news:
                self.poll()
                if until():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"hangs: {what}")
                self.news.wait(min(left, 0.02))

    def poll(self) -> None:
        """Leave lost workers out."""
        now_s = time.monotonic()
        lost = []
        for each in self.members:
            worker = self.workers[each]
            if not worker.over and now_s - worker.seen_s > self._silent_s and not worker.silent:
                worker.silent = True
                self.note(f"w{each} is silent")
                worker.process.kill()
            if worker.silent or worker.over == "gone" or worker.over.startswith("error"):
                lost.append(each)
        left = tuple(each for each in self.members if each not in lost)
        if lost and left:
            self.announce(left, void=True)
        elif self._suspected_s and now_s - self._suspected_s > NOTICE_S:
            self.announce(self.members, void=True)

    def last_step(self, numbers: Sequence[int]) -> int:
        """The last step that all of these have applied."""
        return min((self.workers[each].steps[-1][0] if self.workers[each].steps else 0) for each in numbers)

    def arm(self, number: int, moment: str, sent: int) -> None:
        """Have a worker struck by a signal at its next such moment."""
        self.send(self.workers[number], "arm", moment, sent)

    def finish(self) -> None:
        for each in self.members:
            self.send(self.workers[each], "finish")

    def close(self) -> None:
        for worker in self.workers.values():
            if worker.process.is_alive():
                worker.process.kill()
        for worker in self.workers.values():
            worker.process.join(5.0)
