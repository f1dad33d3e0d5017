"""A whole job without Ray, torch or threads: the real membership machine and simulated workers, on a simulated clock.

Workers follow the protocol of ``elastic_ray.session.session`` and ``elastic_ray.membership.worker_side``: they form
groups ahead, agree by what rides on a step's collective, switch at the step's edge, fail when a peer is gone, and
wait for the next generation. Every message takes a random time, so that messages overtake each other.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import random
from collections.abc import Callable

import numpy as np

from elastic_ray.membership.generation_changes import MembershipConfig
from elastic_ray.membership.instructions import (
    AllLost,
    Announce,
    Complete,
    Instruction,
    Launch,
    Note,
    Release,
    Reserve,
    Withdraw,
)
from elastic_ray.membership.machine import JobMembership
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.roster import WorkerPhase
from elastic_ray.membership.signals import Allocated, Lost, Ready, Reserved, Stimulus, TimePassed
from placement.cluster.sizes import ANY_SIZE, AllowedSizes
from tests.data.pieces import rank_indices
from tests.membership.driver import Ledger
from tests.membership.simulated_groups import Groups, State
from tests.membership.simulated_worker import SimWorker

CONFIG = MembershipConfig(
    min_workers=1,
    reserve_timeout_s=6.0,
    join_timeout_s=8.0,
    switch_timeout_s=5.0,
    patience_s=1.0,
    notice_s=1.0,
    backoff_s=1.0,
)
TICK_S = 0.25
SILENCE_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Where the worker's protocol could be another one; as it stands, it is the session's.

    Attributes:
        lineage: the state that went through the later generation is further, whatever its number of steps.
        regroup_into_planned: a worker whose step failed also takes up a planned change that nobody agreed on.
        automatic: rank 0 saves by itself every so many steps, and all that start together load it; 0 for never.
        unreadable: one worker of each start cannot load what was saved.
    """

    lineage: bool = False
    regroup_into_planned: bool = False
    automatic: int = 0
    unreadable: bool = False


class SimJob:
    """The world and its controller.

    Args:
        seed: of every random choice.
        nodes: workers that fit on each node, by name.
        samples: samples in an epoch.
        batch: global batch size; at least as many as workers fit on all nodes.
        min_workers: fewest workers to begin with.
        rules: of the workers.

    Attributes:
        checkpoint: what the job restarts from.
        safe_ticks: edges that all members of a generation had committed, and that must never be lost.
        trained: whether anything was trained since the last restart.
        last_epoch: the epoch after which training ends; None: it does not end yet.
        finished: states of the workers that have finished.
    """

    def __init__(
        self,
        seed: int,
        nodes: dict[str, int],
        *,
        samples: int = 40,
        batch: int = 12,
        min_workers: int = 1,
        sizes: AllowedSizes = ANY_SIZE,
        rules: Rules = Rules(),
    ) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.now_s = 0.0
        self.min_workers, self.most = min_workers, 0
        self.machine = JobMembership(dataclasses.replace(CONFIG, min_workers=min_workers, sizes=sizes))
        self.ledger = Ledger()
        self.capacity, self.dead_nodes = dict(nodes), set[str]()
        self.samples, self.batch = samples, batch
        self.last_epoch: int | None = None
        self.workers: dict[str, SimWorker] = {}
        self.groups = Groups(self)
        self.checkpoint = State()
        self.loaded = 0  # steps of the furthest checkpoint that a worker reported since the start
        self._unreadable = rules.unreadable
        self.safe_ticks = 0
        self.trained = False
        self.restarts = 0
        self.notes: list[Note] = []
        self.finished: list[State] = []
        self.done = False
        self.away = False
        self._target: dict[str, int] = {}
        self.returns = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._asked: list[str] = []
        self._granted: dict[str, str] = {}
        self.after(TICK_S, self._tick)

    # -- time --------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), action))

    def soon(self, longest_s: float, action: Callable[[], None], *, at_least_s: float = 0.0) -> None:
        """Do something after a random while."""
        self.after(self.random.uniform(at_least_s, longest_s), action)

    def run_for(self, time_s: float) -> None:
        """Let events happen."""
        until_s = self.now_s + time_s
        while self._events and self._events[0][0] <= until_s and not self.done:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        self.now_s = until_s

    # -- the controller ----------------------------------------------------------------------------------------

    def notify(self, stimulus: Stimulus) -> None:
        """Something reaches the controller, which acts as ``JobController._take`` does."""
        if isinstance(stimulus, Lost):
            self.ledger.dead.add(stimulus.worker)
        if isinstance(stimulus, Ready) and stimulus.worker in self.machine.workers and not self.away:
            self.loaded = max(self.loaded, stimulus.loaded)
        if self.done or self.away:
            return
        for instruction in self.machine.handle(stimulus, self.now_s):
            self._perform(instruction)
        self.ledger.check(self.machine)
        assert self._granted.keys() | set(self._asked) == self.machine.workers.keys(), "resources without a worker"

    def send(self, stimulus: Stimulus) -> None:
        """A worker's message to the controller; it may overtake others."""
        self.soon(0.15, lambda: self.notify(stimulus))

    def _tick(self) -> None:
        for record in self.machine.members():
            hung_s = self.workers[record.worker].hung_s
            if hung_s is not None and self.now_s - hung_s > SILENCE_S:
                self.notify(Lost(worker=record.worker, cause="it has been silent"))
        self.notify(TimePassed())
        self.after(TICK_S, self._tick)

    def lose_controller(self) -> None:
        """The controller's process dies; Ray restarts it in a while. What is told meanwhile is lost."""
        if not self.away and not self.done:
            self.away = True
            self.soon(4.0, self._adopt_trainer, at_least_s=0.5)

    def _adopt_trainer(self) -> None:
        """A new controller hears the workers out, and releases what none of them holds."""
        self.away, before = False, self.machine
        if self.done:
            return
        self.returns += 1
        survivors = [w.as_survivor() for w in self.workers.values() if w.name in self._granted and w.testifies]
        self.machine = JobMembership(before.config, first_most=self.most, named=before.named)
        noted = self.random.choice([before.issued, max(0, before.issued - 1)])  # the last may not have been noted
        reached = Allocated(nodes=self._target, reason="test")
        instructions = self.machine.recover(
            survivors,
            reached,
            issued=noted,
            world_size=before.world_size,
            announced=before.announced,
            trained=before.trained,
            now_s=self.now_s,
        )
        announced = [i.spec for i in instructions if isinstance(i, Announce)]
        kept = self.machine.in_flight.spec if self.machine.in_flight is not None else None
        self.ledger.specs = [kept] if kept is not None and kept not in announced else []
        for instruction in instructions:
            self._perform(instruction)
        for worker in (self._granted.keys() | set(self._asked)) - self.machine.workers.keys():
            del self.ledger.open[worker]
            self._release(worker, kill=True)
        self.ledger.check(self.machine)
        for survivor in survivors:
            if (ending := self.workers[survivor.worker].ending) is not None:
                self.send(ending)

    def _perform(self, instruction: Instruction) -> None:
        self.ledger.book(instruction)
        match instruction:
            case Reserve(worker=worker):
                self._asked.append(worker)
                self.soon(0.3, self._grant)
            case Launch(worker=worker, node=node):
                self.workers[worker] = SimWorker(self, worker, node, *self._start())
                if node in self.dead_nodes:
                    self.kill(worker)
            case Release(worker=worker, kill=kill):
                self._release(worker, kill)
            case Announce(spec=spec, to=to):
                self._check_plan(spec)
                for worker in to:
                    self._post(worker, functools.partial(SimWorker.hear_plan, spec=spec))
            case Withdraw(generation=generation, to=to):
                for worker in to:
                    self._post(worker, functools.partial(SimWorker.hear_cancel, generation=generation))
            case Note():
                self.notes.append(instruction)
            case AllLost():
                self._restart()
            case Complete():
                self.done = True

    def _post(self, worker: str, action: Callable[[SimWorker], None]) -> None:
        actor = self.workers[worker]
        self.soon(0.15, lambda: action(actor) if actor.responsive else None)

    def _grant(self) -> None:
        for worker in list(self._asked):
            node = self.ledger.open.get(worker)
            taken = sum(other == node for other in self._granted.values())
            if worker in self._asked and node not in self.dead_nodes and taken < self.capacity[str(node)]:
                self._asked.remove(worker)
                self._granted[worker] = str(node)
                self.notify(Reserved(worker=worker))

    def _release(self, worker: str, kill: bool) -> None:
        if worker in self._asked:
            self._asked.remove(worker)
        else:
            del self._granted[worker]
            self.soon(0.3, self._grant)
        actor = self.workers.get(worker)
        if actor is not None:
            assert kill or not actor.alive, "who is released alive has ended its run"
            actor.die()

    def _check_plan(self, spec: GenerationSpec) -> None:
        flight = self.machine.in_flight
        assert flight is not None
        if self.machine.current is None and not flight.from_state:
            assert flight.loaded >= self.loaded, "training begins anew although there is a checkpoint"
            fewest = min(self.min_workers, self.machine.target_workers, self.most or self.min_workers)
            assert flight.forced or spec.world_size >= fewest, "it begins with fewer than it needs"
        if flight.forced or self.machine.current is None or flight.spec is not spec:
            return
        assert any(self.workers[m.worker].complete for m in spec.members), "nobody brings the state along"

    def _restart(self) -> None:
        holders = self.holding() & {
            w.worker for w in self.machine.workers.values() if w.phase is not WorkerPhase.LEAVING
        }
        assert not holders, f"a checkpoint is read although {holders} hold the state"
        self.restarts += 1
        self.safe_ticks, self.trained, self.loaded = self.checkpoint.ticks, False, 0
        self._unreadable = self.rules.unreadable
        left = self.samples - self.checkpoint.position  # as ``JobRecord.workers_at_most``
        self.most = max(1, left // 2) if self.checkpoint.position else 0
        for instruction in self.machine.reset(first_most=self.most):
            self._perform(instruction)

    def maybe_checkpoint(self, state: State) -> None:
        """Rank 0 has committed a step: now and then it reports a checkpoint, here at the beginning of epochs."""
        every = self.rules.automatic
        if every and state.ticks % every == 0 and not state.final:
            self.checkpoint = dataclasses.replace(state, lineage=0)
        elif not every and state.position == 0 and not state.final:
            self.checkpoint = state

    def _start(self) -> tuple[State, bool]:
        """What a worker that is launched now begins with, and whether that is an automatic checkpoint."""
        if not self.rules.automatic:
            return self.checkpoint, False
        if self.machine.current is not None or not self.checkpoint.ticks:
            return State(), False
        if self._unreadable and self.random.random() < 0.5:
            self._unreadable = False
            return State(), False
        return self.checkpoint, True

    # -- the world ---------------------------------------------------------------------------------------------

    def target(self, nodes: dict[str, int]) -> None:
        """The allocator's word."""
        self._target = nodes
        self.notify(Allocated(nodes=nodes, reason="test"))

    def living(self) -> list[SimWorker]:
        """Processes that run."""
        return [w for w in self.workers.values() if w.responsive]

    def holding(self) -> set[str]:
        """Workers that could continue with training."""
        return {w.name for w in self.workers.values() if w.holds_state}

    def kill(self, worker: str) -> None:
        """A process dies; Ray tells the controller in a while."""
        if self.workers[worker].alive:
            self.workers[worker].die()
            self.soon(1.0, lambda: self.notify(Lost(worker=worker, cause="its process died")), at_least_s=0.02)

    def kill_node(self, node: str) -> None:
        """A node dies with all that runs on it."""
        self.dead_nodes.add(node)
        for worker in list(self.workers.values()):
            if worker.node == node:
                self.kill(worker.name)

    def check_samples(self) -> int:
        """Every sample of every epoch was used exactly once by the steps that led to the final state."""
        assert self.finished, "somebody has finished"
        assert len({state.parent for state in self.finished}) == 1, "all finished with the same bits"
        used: dict[int, list[int]] = {}
        after, state = self.finished[0], self.finished[0].parent
        epochs = state.epoch + 1 if state is not None else 0
        while state is not None:
            if after.epoch == state.epoch:
                step = np.arange(state.position, after.position, dtype=np.int64)
                for rank in range(after.world):
                    for piece in rank_indices(step, rank=rank, world_size=after.world):
                        used.setdefault(state.epoch, []).extend(piece.tolist())
            after, state = state, state.parent
        for epoch in range(epochs):
            assert sorted(used[epoch]) == list(range(self.samples)), f"epoch {epoch}"
        return epochs
