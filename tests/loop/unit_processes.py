"""Units of processes, with torch's own default group in each: they join, leave and die at fixed steps. No Ray."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.communication.communicator import Communicator
from elastic_ray.communication.unit_group import UnitCommunicator, UnitGroup
from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.run.current import WorkerDismissed, set_session
from elastic_ray.session.default_group import install_unit
from elastic_ray.session.session import Session
from elastic_ray.state.progress import Link
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.unit import Unit, place_in
from tests.membership.groups import LocalController, member

_WAIT_S = 60.0
_FORKS = multiprocessing.get_context("forkserver")
_PRELOADED = ["torch.distributed.tensor.parallel", "torch.distributed.fsdp", "elastic_ray", "tests.job.united"]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Worker of a unit."""

    number: int  # of the unit, from 1
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """The job's units after some steps, the worker that dies at a moment of a step, and the units that come then."""

    changes: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    kill: tuple[Place, str, int] | None = None
    joins: tuple[int, ...] = ()


class _Parent:
    """A worker's way to the process that runs the job; takes the place of its scripted faults too."""

    paced = False
    secret = ""

    def __init__(self, pipe: Any, me: Place, script: Script) -> None:
        self._pipe, self._me, self._script = pipe, me, script
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self.membership: WorkerMembership

    def listen(self) -> None:
        """Hear from the parent for as long as it lives."""
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        while True:
            try:
                kind, *rest = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(1)
            if kind == "spec":
                self.membership.post(rest[0])
            else:
                number, value = rest
                answer = self._answers.pop(number)
                answer.set_exception(value) if isinstance(value, Exception) else answer.set_result(value)

    def ask(self, *what: Any) -> Future[Any]:
        """Send a message that is answered."""
        answer: Future[Any] = Future()
        number = next(self._numbers)
        self._answers[number] = answer
        self.send("ask", number, *what)
        return answer

    def send(self, *what: Any) -> None:
        """Send a message."""
        with self._lock:
            self._pipe.send(what)

    def call(self, meeting: Any) -> Future[dict[str, bytes]]:
        """As a ``LocalController``'s."""
        return self.ask("meet", self._me.position, meeting)

    def ready(self, loader: LoaderInfo | None, *, has_state: bool, loaded: int = 0) -> None:
        self.send("ready")

    def failed(self, generation: int, cause: str) -> None: ...

    def switched(self, generation: int, pause: Pause, proof: Link) -> None:
        self.send("switched", generation)

    def report_soon(self) -> None: ...

    def report_missed(self, metrics: Mapping[str, Any], resume_point: ResumePoint, index: int) -> None: ...

    def report(self, metrics: Mapping[str, Any], checkpoint: Any, resume_point: ResumePoint, index: int) -> None: ...

    def notify(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        self.send("told", kind, text)

    def tracker_dir(self) -> str:
        raise NotImplementedError

    def claim_fault(self, index: int) -> bool:
        return False

    def at(self, moment: str, *, worker: str, rank: int, step: int) -> None:
        """Die here, or wait until the next group of a change after this step is formed."""
        if self._script.kill == (self._me, moment, step):
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == "forward" and step in self._script.changes:
            generation = self.ask("change", step).result(_WAIT_S)
            deadline = time.monotonic() + _WAIT_S
            while self.membership.generation < generation and self.membership.prepared_spec(generation) is None:
                assert time.monotonic() < deadline, f"generation {generation} is not formed"
                time.sleep(0.002)  # until a thread has formed it


def _work(
    pipe: Any,
    secrets: Sequence[str],
    me: Place,
    unit: Unit | int,
    store: str,
    script: Script,
    train: Callable[[dict[str, Any]], Any],
    config: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Run one worker of a unit."""
    import torch

    torch.set_num_threads(1)
    parent = _Parent(pipe, me, script)
    parent.secret = secrets[me.position]
    group = UnitGroup(place_in(unit, me.position, store), cuda=False, timeout_s=_WAIT_S)
    install_unit(group)
    make = functools.partial(UnitCommunicator, group)

    def form(spec: GenerationSpec, rank: int) -> Communicator:
        told: Any = parent
        number = spec.generation
        return member(told, rank, spec.world_size, generation=number, make=make, form_s=_WAIT_S, timeout_s=_WAIT_S)

    membership = WorkerMembership(f"w{me.number}", form, lambda generation, cause: None)
    parent.membership = membership
    scripted: Any = parent
    session = Session(f"w{me.number}", membership, parent, unit=group, faults=scripted, **options)
    parent.listen()
    set_session(session)
    try:
        result = train(config)
        session.finish()
        parent.send("done", result)
    except WorkerDismissed:
        parent.send("left")
    except BaseException as error:
        parent.send("error", f"{type(error).__name__}: {error}")
    os._exit(0)


class UnitJob:
    """A job of units of processes.

    Attributes:
        told: What the job's user was told by the units' first workers.
        groups: The units of each group.
    """

    def __init__(
        self,
        train: Callable[[dict[str, Any]], Any],
        config: dict[str, Any],
        folder: Path,
        unit: Unit | int,
        **options: Any,
    ) -> None:
        self._train, self._config, self._folder, self._unit, self._options = train, config, folder, unit, options
        self._size = unit if isinstance(unit, int) else unit.size
        self._controllers = [LocalController() for _ in range(self._size)]
        self._pipes: dict[Place, Any] = {}
        self._processes: dict[Place, Any] = {}
        self._ready: set[Place] = set()
        self._asked: dict[int, list[tuple[Any, int]]] = {}
        self._changed: dict[int, int] = {}
        self._void = False
        self._members: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self.told: list[tuple[str, str]] = []
        self.groups: list[tuple[int, ...]] = []

    def run(self, first: tuple[int, ...], script: Script | None = None) -> dict[Place, dict[str, Any]]:
        """Return what the train function returns on each worker that is there at the end."""
        self._script = script or Script()
        try:
            return self._run(first)
        finally:
            for process in self._processes.values():
                process.kill()
                process.join()
            for controller in self._controllers:
                controller.close()

    def _run(self, first: tuple[int, ...]) -> dict[Place, dict[str, Any]]:
        self._start(first)
        waiting: tuple[int, ...] | None = first
        results: dict[Place, dict[str, Any]] = {}
        ended: set[Place] = set()
        deadline = time.monotonic() + 4 * _WAIT_S
        while set(self._processes) - ended:
            assert time.monotonic() < deadline, "the job takes too long"
            by_pipe = {pipe: place for place, pipe in self._pipes.items() if place not in ended}
            pipe: Any
            for pipe in multiprocessing.connection.wait(list(by_pipe), 1.0):
                place = by_pipe[pipe]
                try:
                    kind, *rest = pipe.recv()
                except (EOFError, OSError):
                    ended.add(place)
                    if place.number in self._members and place not in results:
                        waiting = self._lose(place.number, ended)
                    continue
                if kind == "error" and not (self._script.kill and self._script.kill[0].number == place.number):
                    raise RuntimeError(rest[0])
                if kind == "ready":
                    self._ready.add(place)
                elif kind == "done":
                    results[place] = rest[0]
                elif kind == "told" and place.position == 0 and rest not in map(list, self.told):
                    self.told.append((rest[0], rest[1]))
                elif kind == "ask":
                    waiting = self._answer(pipe, *rest) or waiting
            if waiting is not None and all(p in self._ready for p in self._processes if p.number in waiting):
                self._announce(waiting, void=self._void)
                waiting, self._void = None, False
        return results

    def _start(self, units: Sequence[int]) -> None:
        for place in (Place(number, position) for number in units for position in range(self._size)):
            mine, theirs = multiprocessing.Pipe()
            store = str(self._folder / f"unit-{place.number}" / "store")
            secrets = [controller.secret for controller in self._controllers]
            given = (theirs, secrets, place, self._unit, store, self._script, self._train, self._config, self._options)
            process = _FORKS.Process(target=_work, args=given, daemon=True)
            _FORKS.set_forkserver_preload(_PRELOADED)
            process.start()
            theirs.close()
            self._pipes[place], self._processes[place] = mine, process

    def _answer(self, pipe: Any, number: int, kind: str, *what: Any) -> tuple[int, ...] | None:
        """Answer a worker; return the units of a change that it has come to, once for all workers."""
        if kind == "meet":
            answer = self._controllers[what[0]].call(what[1])
            answer.add_done_callback(lambda done: self._send(pipe, "answer", number, done.exception() or done.result()))
            return None
        step = what[0]
        first = step not in self._asked
        self._asked.setdefault(step, []).append((pipe, number))
        if not first:
            if step in self._changed:
                self._send(pipe, "answer", number, self._changed[step])
                self._asked[step].pop()
            return None
        units = self._script.changes[step]
        self._start([each for each in units if each not in self._members])
        return units

    def _lose(self, number: int, ended: set[Place]) -> tuple[int, ...]:
        """End the other workers of a unit that has lost one; return the units that go on."""
        for place, process in self._processes.items():
            if place.number == number:
                process.kill()
                ended.add(place)
        self._start(self._script.joins)
        self._void = True
        return (*(each for each in self._members if each != number), *self._script.joins)

    def _announce(self, units: tuple[int, ...], *, void: bool) -> None:
        told = {*self._members, *units}
        self._members = units
        self.groups.append(units)
        generation = len(self.groups)
        members = tuple(Member(worker=f"w{each}", node="here") for each in units)
        spec = GenerationSpec(generation=generation, members=members, void_below=generation if void else 0)
        for place, pipe in self._pipes.items():
            if place.number in told:
                self._send(pipe, "spec", spec)
        for step, asked in self._asked.items():
            if step not in self._changed and not void:
                self._changed[step] = generation
            while asked and not void:
                pipe, number = asked.pop()
                self._send(pipe, "answer", number, generation)

    def _send(self, pipe: Any, *what: Any) -> None:
        with self._lock:
            try:
                pipe.send(what)
            except OSError:
                return  # it has ended
