"""Drives the membership machine by hand: a clock, short names for stimuli, and what must hold after each of them."""

from __future__ import annotations

from typing import TypeVar

from elastic_ray.events import EventKind, Pause
from elastic_ray.membership.generation_changes import MembershipConfig
from elastic_ray.membership.instructions import AllLost, Announce, Complete, Instruction, Note, Release, Reserve
from elastic_ray.membership.machine import JobMembership
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.roster import WorkerPhase
from elastic_ray.membership.signals import (
    Allocated,
    Finished,
    Left,
    Lost,
    Ready,
    Replace,
    Reserved,
    Stimulus,
    Switched,
    TimePassed,
)

CONFIG = MembershipConfig(
    min_workers=1,
    reserve_timeout_s=60.0,
    join_timeout_s=120.0,
    switch_timeout_s=20.0,
    patience_s=5.0,
    notice_s=1.0,
    backoff_s=5.0,
)
Kind = TypeVar("Kind")


class Ledger:
    """Whose resources are taken, and which generations were announced: checks that nothing is counted twice."""

    def __init__(self) -> None:
        self.open: dict[str, str] = {}
        self.seen: set[str] = set()
        self.specs: list[GenerationSpec] = []
        self.dead: set[str] = set()

    def book(self, instruction: Instruction) -> None:
        """Take one instruction into account."""
        match instruction:
            case Reserve(worker=worker, node=node):
                assert worker not in self.seen, f"{worker} was asked for twice"
                self.open[worker] = node
                self.seen.add(worker)
            case Release(worker=worker):
                assert worker in self.open, f"{worker} was given back twice, or never asked for"
                del self.open[worker]
            case Announce(spec=spec, to=to):
                self._book_plan(spec, to)

    def _book_plan(self, spec: GenerationSpec, to: tuple[str, ...]) -> None:
        names = [m.worker for m in spec.members]
        assert not self.specs or spec.generation > self.specs[-1].generation, "generations must grow"
        assert names, "a generation has members"
        assert len(set(names)) == len(names), "one rank a worker"
        assert set(names) <= set(to), "every member is told"
        assert not self.dead & set(names), f"generation {spec.generation} has members known to be dead"
        assert {m.worker: m.node for m in spec.members}.items() <= self.open.items(), "members hold their resources"
        self.specs.append(spec)

    def check(self, machine: JobMembership) -> None:
        """What must hold between two stimuli."""
        assert {w.worker: w.node for w in machine.workers.values()} == self.open
        flight, current = machine.in_flight, machine.current
        if flight is not None:
            assert flight.spec.generation == self.specs[-1].generation, "only the newest generation is in flight"
        if current is not None and flight is not None:
            assert current.generation <= flight.spec.generation
        assert all(w.has_state for w in machine.workers.values() if w.phase is WorkerPhase.MEMBER)


class Driver:
    """The machine, its clock, and every instruction so far."""

    def __init__(self, config: MembershipConfig = CONFIG, *, first_most: int = 0) -> None:
        self.machine = JobMembership(config, first_most=first_most)
        self.now_s = 100.0
        self.ledger = Ledger()
        self.log: list[Instruction] = []

    def notify(self, stimulus: Stimulus, *, after_s: float = 0.0) -> list[Instruction]:
        """Hand a stimulus over; performs a reset as the controller does, in the middle of the instructions."""
        self.now_s += after_s
        if isinstance(stimulus, Lost):
            self.ledger.dead.add(stimulus.worker)
        out: list[Instruction] = []
        for instruction in self.machine.handle(stimulus, self.now_s):
            out.append(instruction)
            self.ledger.book(instruction)
        self.ledger.check(self.machine)
        self.log += out
        return out

    def tick(self, after_s: float = 0.0) -> list[Instruction]:
        """Let time pass."""
        return self.notify(TimePassed(), after_s=after_s)

    def target(self, **nodes: int) -> list[Instruction]:
        """The allocator's word."""
        return self.notify(Allocated(nodes=nodes, reason="test"))

    def replace(self, *workers: str, after_s: float = 0.0) -> list[Instruction]:
        """These are too slow."""
        return self.notify(Replace(workers=frozenset(workers), reason="slow"), after_s=after_s)

    def reserved(self, *workers: str) -> list[Instruction]:
        """Their resources are there."""
        return [i for worker in workers for i in self.notify(Reserved(worker=worker))]

    def ready(self, *workers: str, has_state: bool = False, loaded: int = 0) -> list[Instruction]:
        """They have built everything."""
        told = [Ready(worker=worker, has_state=has_state, loaded=loaded) for worker in workers]
        return [i for stimulus in told for i in self.notify(stimulus)]

    def switched(self, generation: int, *workers: str, pause_s: float = 0.1) -> list[Instruction]:
        """They train in that generation."""
        told = [Switched(worker=w, generation=generation, pause=Pause(state_s=pause_s)) for w in workers]
        return [i for stimulus in told for i in self.notify(stimulus)]

    def left(self, worker: str) -> list[Instruction]:
        """Its train function has unwound."""
        return self.notify(Left(worker=worker))

    def finished(self, *workers: str) -> list[Instruction]:
        """Their train functions have returned."""
        return [i for worker in workers for i in self.notify(Finished(worker=worker))]

    def lost(self, worker: str, cause: str = "its process died") -> list[Instruction]:
        """It died."""
        return self.notify(Lost(worker=worker, cause=cause))

    def join(self, *workers: str) -> list[Instruction]:
        """Reserved, launched and ready."""
        return self.reserved(*workers) + self.ready(*workers)

    @property
    def names(self) -> list[str]:
        """Members of the generation in effect, by rank."""
        return [m.worker for m in self.machine.current.members] if self.machine.current is not None else []

    @property
    def asked(self) -> set[str]:
        """Workers whose resources are taken or asked for."""
        return set(self.ledger.open)


def running(workers: int = 2, *, node: str = "n1", config: MembershipConfig = CONFIG) -> Driver:
    """A job that trains in generation 1 with w1, w2..., all on one node."""
    driver = Driver(config)
    driver.target(**{node: workers})
    names = [f"w{index + 1}" for index in range(workers)]
    driver.reserved(*names)
    driver.ready(*names)
    driver.switched(1, *names)
    assert driver.names == names
    return driver


def only(kind: type[Kind], instructions: list[Instruction]) -> list[Kind]:
    """The instructions of one kind."""
    return [i for i in instructions if isinstance(i, kind)]


def plan_in(instructions: list[Instruction]) -> GenerationSpec:
    """The only generation announced."""
    (announced,) = only(Announce, instructions)
    return announced.spec


def members_of(spec: GenerationSpec) -> list[str]:
    """Workers by rank."""
    return [m.worker for m in spec.members]


def kinds(instructions: list[Instruction]) -> list[EventKind]:
    """The kinds of the events recorded."""
    return [note.kind for note in only(Note, instructions)]


def ended(instructions: list[Instruction]) -> list[Instruction]:
    """What ends the job's present life."""
    return [i for i in instructions if isinstance(i, (AllLost, Complete))]


def growing(workers: int = 1) -> tuple[Driver, str]:
    """A job in generation 1 that has announced generation 2 with one joiner."""
    driver = running(workers)
    driver.target(n1=workers + 1)
    joiner = f"w{workers + 1}"
    assert plan_in(driver.join(joiner)).generation == 2
    return driver, joiner
