"""A job whose workers are threads: they join, leave and die at fixed steps, over real gloo groups. No Ray."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec, Member, Returned
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.run.current import WorkerDismissed, set_session
from elastic_ray.session.session import Session
from elastic_ray.state.progress import Link
from elastic_ray.state.resume_point import ResumePoint
from tests.membership.groups import LocalController, local_controller, member

_WAIT_S = 30.0
_ATTEMPTS = 3  # to form a group
_PORT_RACE = re.compile("already in use")  # another process took the port between its choice and its use
_MOST_S = 300.0  # of a run
_NOTICE_S = 1.0  # after the first news of a failure, all get another group

# Loaders' processes are forked by workers that are threads here: a lock that another worker holds just then would be
# held for ever in the process, whose first act is to seed torch.
_seeding = torch.cuda._initialization_lock
os.register_at_fork(before=_seeding.acquire, after_in_parent=_seeding.release, after_in_child=_seeding.release)


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """The job is to have these workers after its step number ``step`` (workers count from 1)."""

    step: int
    workers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """A worker dies when it has committed ``step`` steps and comes to ``moment``; ``last``: as the last of all.

    Workers that are in ``after`` have come there before, or to ``after_moment`` where that is another one.
    Workers that are in ``joins`` enter with the group that is formed then.
    """

    step: int
    worker: int
    moment: str
    last: bool = False
    joins: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    after_moment: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Hold:
    """A worker that has committed ``step`` steps waits at ``moment`` until its group is called off.

    ``fails``: what it did there has failed then, although the others' has not.
    """

    step: int
    worker: int
    moment: str
    fails: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Spoil:
    """What a worker holds after ``step`` steps is not what it was sent: one bit of its first parameter is another."""

    step: int
    worker: int


class Killed(BaseException):
    """A worker's end; those in ``joins`` enter with the group that is formed then."""

    def __init__(self, joins: tuple[int, ...]) -> None:
        self.joins = joins


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of a job.

    Attributes:
        results: what the train function returned, by worker.
        told: what the job's user was told: kind, text and numbers.
        passes: the same of training passes that have ended.
        groups: the workers of each group, in order.
        reports: metrics that rank 0 has reported, by number.
        proofs: of each group, by its generation and the worker.
    """

    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    told: list[tuple[str, str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    passes: list[tuple[str, str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    groups: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    reports: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    proofs: dict[int, dict[int, Link]] = dataclasses.field(default_factory=dict)


class _Link:
    """One worker's way to the job."""

    paced = False

    def __init__(self, job: _Job, worker: int) -> None:
        self._job, self._worker = job, worker

    def ready(self, loader: LoaderInfo | None, *, has_state: bool, loaded: int = 0) -> None:
        self._job.is_ready(self._worker)

    def failed(self, generation: int, cause: str) -> None:
        self._job.failed(self._worker, generation)

    def switched(self, generation: int, pause: Pause, proof: Link) -> None:
        self._job.outcome.proofs.setdefault(generation, {})[self._worker] = proof

    def report_soon(self) -> None: ...

    def report(self, metrics: Mapping[str, Any], checkpoint: Any, resume_point: ResumePoint, index: int) -> None:
        self._job.outcome.reports[index] = dict(metrics)

    def report_missed(self, metrics: Mapping[str, Any], resume_point: ResumePoint, index: int) -> None:
        self._job.outcome.reports.setdefault(index, dict(metrics))

    def notify(self, kind: str, text: str, detail: Mapping[str, Any]) -> None:
        notice = (kind, text, dict(detail))
        told = self._job.outcome.passes if kind == "pass" else self._job.outcome.told
        if "number" not in detail or notice not in told:  # as the job's controller
            told.append(notice)

    def tracker_dir(self) -> str:
        raise NotImplementedError

    def claim_fault(self, index: int) -> bool:
        return False


class _Script:
    """Takes the place of a worker's scripted faults: every moment of its run comes by here."""

    def __init__(self, job: _Job, worker: int) -> None:
        self._job, self._worker = job, worker

    def at(self, moment: str, *, worker: str, rank: int, step: int) -> None:
        self._job.moment(self._worker, moment, step)


class _Job:
    def __init__(
        self,
        train: Callable[[], Any],
        script: Sequence[Change | Kill | Hold | Spoil],
        controller: LocalController,
        options: Mapping[str, Any],
        fixed_batch: bool,
        nodes: int,
    ) -> None:
        self._train, self._controller, self._fixed_batch, self._nodes = train, controller, fixed_batch, nodes
        self._options = {"form_s": _WAIT_S, "timeout_s": _WAIT_S, **options}
        self._kills = [each for each in script if isinstance(each, Kill)]
        self._holds = {(each.worker, each.step, each.moment): each for each in script if isinstance(each, Hold)}
        self._spoils = {(each.worker, each.step) for each in script if isinstance(each, Spoil)}
        self._changes = {each.step: each.workers for each in script if isinstance(each, Change)}
        self._lock = threading.RLock()
        self._sessions: dict[int, Session] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._ready: dict[int, threading.Event] = {}
        self._errors: list[BaseException] = []
        self._generation = 0
        self._reached: set[tuple[int, str, int]] = set()
        self._announced: dict[int, int] = {}  # generation that a step's change leads to
        self._failed: set[tuple[int, int]] = set()  # worker and generation
        self._suspected: dict[int, float] = {}  # generation, and when one of its members wanted another
        self._dying: set[int] = set()  # workers that are dead, but whose group without them is not announced yet
        self._told: tuple[int, ...] = ()  # workers that know of the latest generation
        self._void = False  # whether that voids those before it
        self._attempts = 0  # to form it
        self._returned: dict[int, int] = {}  # workers whose train function has returned, with their steps
        self._over = False
        self.members: tuple[int, ...] = ()
        self.outcome = Outcome()

    def run(self, first: Sequence[int]) -> Outcome:
        try:
            return self._run(first)
        finally:
            with self._lock:
                self._over = True

    def _run(self, first: Sequence[int]) -> Outcome:
        for worker in first:
            self.start(worker)
        self.announce(tuple(first))
        deadline = time.monotonic() + _MOST_S
        while any(thread.is_alive() for thread in self._threads.values()):
            for thread in list(self._threads.values()):
                thread.join(0.05)
            self._act_on_notice()
            if self._errors:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"workers {[n for n, each in self._threads.items() if each.is_alive()]} still run")
        if self._errors:
            raise self._errors[0]
        return self.outcome

    def start(self, worker: int) -> None:
        """Start a worker, and wait until it has built its model."""
        self._ready[worker] = threading.Event()

        options = dict(self._options)
        make = options.pop("make", None)

        def form(spec: GenerationSpec, rank: int) -> Communicator:
            made = {} if make is None else {"make": functools.partial(make, generation=spec.generation)}
            return member(self._controller, rank, spec.world_size, generation=spec.generation, **options, **made)

        membership = WorkerMembership(f"w{worker}", form, self.form_again)
        session = Session(
            f"w{worker}",
            membership,
            _Link(self, worker),
            faults=_Script(self, worker),
            fixed_batch=self._fixed_batch,
        )
        self._sessions[worker] = session
        thread = threading.Thread(target=self._work, args=(worker, session), daemon=True)
        thread.start()
        self._threads[worker] = thread  # :meth:`run` joins those that are there
        assert self._ready[worker].wait(_WAIT_S), self._errors

    def _work(self, worker: int, session: Session) -> None:
        set_session(session)
        try:
            self.outcome.results[worker] = self._train()
            session.finish()
            session.membership.close(broken=False)
            self._finished(worker, session.progress.loader_steps)
        except WorkerDismissed:
            session.membership.close(broken=False)
        except Killed as killed:
            session.membership.close(broken=True)
            with self._lock:
                for each in killed.joins:
                    self.start(each)
                left = tuple(each for each in self.members if each != worker)
                self.announce((*left, *killed.joins), void=True)
                self._dying.discard(worker)
        except BaseException as error:
            # Were its group left to Python's collector, some thread of a later test would wait for pending operations.
            session.membership.close(broken=True)
            self._errors.append(error)
            self._ready[worker].set()

    def _finished(self, worker: int, steps: int) -> None:
        """A worker has returned: a group that waits for it is formed again without it."""
        with self._lock:
            self._returned[worker] = steps
            if self._void and worker in self.members and self._sessions[worker].group.generation < self._generation:
                self.announce(self.members, void=True)

    def is_ready(self, worker: int) -> None:
        self._ready[worker].set()

    def failed(self, worker: int, generation: int) -> None:
        """Once all members want another group and none of them is dead, announce one of all, as the controller does."""
        with self._lock:
            self._failed.add((worker, generation))
            self._suspected.setdefault(generation, time.monotonic())
            if generation == self._generation and all((each, generation) in self._failed for each in self.members):
                self.announce(self.members, void=True)

    def form_again(self, generation: int, cause: str) -> None:
        """A group could not be formed: the same one is tried under another number, as the controller does."""
        with self._lock:
            if self._over:
                return
            if not _PORT_RACE.search(cause):
                self._errors.append(AssertionError(f"generation {generation} could not be formed: {cause}"))
            if generation != self._generation or self._attempts >= _ATTEMPTS:
                return
            self.outcome.groups.pop()
            again = self.announce(self.members, void=self._void, also=self._told, attempts=self._attempts + 1)
            self._announced = {step: again if of == generation else of for step, of in self._announced.items()}

    def _act_on_notice(self) -> None:
        """So also where some want it for long, and the others wait for those in vain."""
        with self._lock:
            since = self._suspected.get(self._generation)
            if since is not None and not self._dying and time.monotonic() - since > _NOTICE_S:
                self.announce(self.members, void=True)

    def announce(
        self, workers: tuple[int, ...], *, void: bool = False, also: tuple[int, ...] = (), attempts: int = 1
    ) -> int:
        """Tell everybody of the next group, which those who have returned are not in."""
        workers = tuple(each for each in workers if each not in self._returned) if void else workers
        self._generation += 1
        self._attempts = attempts
        self._told, self._void = tuple(dict.fromkeys([*self.members, *workers, *also])), void
        self.members = workers
        self.outcome.groups.append(workers)
        spec = GenerationSpec(
            generation=self._generation,
            members=tuple(Member(worker=f"w{each}", node=f"node-{each % self._nodes}") for each in workers),
            void_below=self._generation if void else 0,
            returned=tuple(Returned(rank=each - 1, steps=steps) for each, steps in self._returned.items()),
        )
        for each in self._told:
            self._sessions[each].membership.post(spec)
        return self._generation

    def moment(self, worker: int, moment: str, step: int) -> None:
        self._reached.add((worker, moment, step))
        for kill in list(self._kills):
            if (kill.worker, kill.step, kill.moment) == (worker, step, moment):
                self._kills.remove(kill)
                self._wait_for(self.members if kill.last else kill.after, kill.after_moment or moment, step)
                self._dying.add(worker)
                raise Killed(kill.joins)
        if moment == "received" and (worker, step) in self._spoils:
            first = next(iter(self._sessions[worker].states.alike().values()))
            first.detach().view(torch.int32).view(-1)[0] ^= 1
        if (hold := self._holds.pop((worker, step, moment), None)) is not None:
            _wait(lambda: self._sessions[worker].membership.voided)
            if hold.fails:
                raise CommunicationFailedError("the group was called off")
        if moment == "forward" and step in self._changes:
            self._prepare(worker, step)

    def _wait_for(self, workers: Sequence[int], moment: str, step: int) -> None:
        """Until these have come there as well."""
        _wait(lambda: all((each, moment, step) in self._reached for each in workers))

    def _prepare(self, worker: int, step: int) -> None:
        """Hold each worker in the step until it has formed the group to go to, so that the step's end is where."""
        membership = self._sessions[worker].membership
        with self._lock:
            if step not in self._announced:
                for each in self._changes[step]:
                    if each not in self.members:
                        self.start(each)
                self._announced[step] = self.announce(self._changes[step])

        def formed() -> bool:
            generation = self._announced[step]
            return membership.generation >= generation or membership.prepared_spec(generation) is not None

        _wait(formed)


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not until():
        assert time.monotonic() < deadline, "the other workers have not come so far"
        time.sleep(0.002)


def run_job(
    train: Callable[[], Any],
    script: Sequence[Change | Kill | Hold | Spoil] = (),
    *,
    first: Sequence[int] = (1,),
    fixed_batch: bool = False,
    nodes: int = 1,
    **options: Any,
) -> Outcome:
    """Run a train function in a thread for each worker, while the script says which workers there are.

    ``fixed_batch`` is the job's; ``nodes`` is the number of nodes that workers take in turn; ``options`` are those of
    their communicators.
    """
    with local_controller() as controller:
        return _Job(train, script, controller, options, fixed_batch, nodes).run(first)
