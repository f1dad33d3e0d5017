"""Groups of simulated workers: how they form, their collectives, the exchange of state, and what deaths do."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_ray.consensus.intents import agreed_generations_ahead
from elastic_ray.data.sharding import step_size
from elastic_ray.membership.messages import GenerationSpec, StateVersion, transfer_rounds

if TYPE_CHECKING:
    from tests.membership.simulated_job import SimJob
    from tests.membership.simulated_worker import SimWorker

FORM_TIMEOUT_S = 5.0
COLLECTIVE_TIMEOUT_S = 6.0
# Gloo tells only some survivors that a peer has died (docs/protocol.md, pitfall 1).
HEARS_OF_DEATH = 0.6
_LINEAGE = 1 << 40


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class State:
    """A trained state: two ranks hold the same bits exactly when they hold the same object.

    Attributes:
        ticks: committed edges since the start.
        epoch: epoch in progress.
        position: samples of it that were used.
        parent: the state before the last edge; None at the start.
        world: workers that shared the last step.
        final: training is complete.
        lineage: generation of the last edge; 0 where it was loaded.
    """

    ticks: int = 0
    epoch: int = 0
    position: int = 0
    parent: State | None = None
    world: int = 0
    final: bool = False
    lineage: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """What a step's collective leads to, the same on every rank."""

    state: State
    ahead: int


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A rank's part in an exchange of state.

    Attributes:
        at_s: when it has the furthest state [s after the exchange began].
        source: who sends it; None where it holds that state.
        state: the furthest state.
    """

    at_s: float
    source: str | None
    state: State


@dataclasses.dataclass(slots=True)
class Group:
    """One generation's group."""

    spec: GenerationSpec
    forming: set[str] = dataclasses.field(default_factory=set)
    given: dict[int, dict[str, tuple[State, int]]] = dataclasses.field(default_factory=dict)
    waiting: dict[str, tuple[int, Callable[[Edge], None]]] = dataclasses.field(default_factory=dict)
    absent: set[str] = dataclasses.field(default_factory=set)
    delivered: dict[State, int] = dataclasses.field(default_factory=dict)
    shares: dict[str, Share] = dataclasses.field(default_factory=dict)
    got: set[str] = dataclasses.field(default_factory=set)

    @property
    def names(self) -> list[str]:
        """Members by rank."""
        return [m.worker for m in self.spec.members]


class Groups:
    """All groups of a job."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        self._groups: dict[int, Group] = {}

    def of(self, spec: GenerationSpec) -> Group:
        """The group of a generation."""
        group = self._groups.setdefault(spec.generation, Group(spec))
        assert group.spec.members == spec.members, "a generation is announced once"
        return group

    def died(self, worker: str) -> None:
        """Its sockets are closed: some peers that wait for it notice."""
        for group in self._groups.values():
            if worker in group.names:
                group.absent.add(worker)
                for peer in list(group.waiting):
                    self._notice(group, peer)
                if len(group.forming) < len(group.names):
                    for peer in sorted(group.forming - group.absent):
                        self._could_not_form(group, self._job.workers[peer], self._job.random.uniform(0.02, 1.0))

    def _notice(self, group: Group, worker: str) -> None:
        token = self._job.workers[worker].token
        if self._job.random.random() < HEARS_OF_DEATH:
            self._job.soon(0.6, lambda: self._job.workers[worker].fail("reset by peer", token), at_least_s=0.01)

    # -- forming -----------------------------------------------------------------------------------------------

    def form(self, spec: GenerationSpec, worker: SimWorker) -> None:
        """A worker's background thread forms the group of a generation."""
        group = self.of(spec)
        group.forming.add(worker.name)
        if group.absent:
            self._could_not_form(group, worker, self._job.random.choice([0.1, FORM_TIMEOUT_S]))
        elif len(group.forming) == len(group.names):
            for name in group.names:
                peer, life = self._job.workers[name], self._job.workers[name].life
                self._job.soon(0.1, functools.partial(peer.formed, spec, life))
        else:
            self._could_not_form(group, worker, FORM_TIMEOUT_S)

    def _could_not_form(self, group: Group, worker: SimWorker, delay_s: float) -> None:
        life = worker.life

        def give_up() -> None:
            if group.absent or len(group.forming) < len(group.names):
                worker.not_formed(group.spec, life)

        self._job.after(delay_s, give_up)

    # -- collectives -------------------------------------------------------------------------------------------

    def collective(
        self, worker: SimWorker, spec: GenerationSpec, number: int, ahead: int, then: Callable[[Edge], None]
    ) -> None:
        """Take part in a generation's collective ``number``; ``then`` follows when all did."""
        group, job = self.of(spec), self._job
        given = group.given.setdefault(number, {})
        given[worker.name] = (worker.state, ahead)
        group.waiting[worker.name] = (worker.token, then)
        if len(given) == len(group.names):
            self._complete(group, list(given.values()), number)
            return
        if group.absent:
            self._notice(group, worker.name)
        token = worker.token
        job.after(COLLECTIVE_TIMEOUT_S, lambda: worker.fail("timeout", token))

    def _complete(self, group: Group, given: list[tuple[State, int]], number: int) -> None:
        if number == 0:
            self._share_out(group)
        edge = Edge(given[0][0], 0) if number == 0 else self._step(group, given)
        waiting, group.waiting = group.waiting, {}
        for name, (token, then) in waiting.items():
            self._job.soon(0.03, functools.partial(self._deliver, name, token, then, edge))

    def _deliver(self, name: str, token: int, then: Callable[[Edge], None], edge: Edge) -> None:
        worker = self._job.workers[name]
        if worker.responsive and worker.token == token:
            then(edge)

    def _step(self, group: Group, given: list[tuple[State, int]]) -> Edge:
        job, world, lineage = self._job, len(group.names), group.spec.generation
        (state, *others), distances = [s for s, _ in given], [ahead for _, ahead in given]
        assert all(other is state for other in others), "all ranks of a step hold the same bits"
        if state.ticks < job.safe_ticks:  # whoever starts over in place may be all that is left, and behind
            further = [w.name for w in job.workers.values() if w.holds_state and w.state.ticks > state.ticks]
            assert not further, f"a step that every member had committed is lost, although {further} hold it"
            job.safe_ticks = state.ticks
        ahead = agreed_generations_ahead(float(sum(distances)), float(sum(d * d for d in distances)), world)
        assert ahead == (distances[0] if len(set(distances)) == 1 else 0)
        count = step_size(position=state.position, total=job.samples, batch_size=job.batch, world_size=world)
        if count:
            after = State(state.ticks + 1, state.epoch, state.position + count, state, world, lineage=lineage)
        else:  # the vote at the end of a pass
            final = job.last_epoch is not None and state.epoch >= job.last_epoch
            after = State(state.ticks + 1, state.epoch + 1, 0, state, world, final, lineage)
        return Edge(after, ahead)

    def committed(self, spec: GenerationSpec, state: State) -> None:
        """A member has committed a step; once all have, it can never be lost again."""
        group = self.of(spec)
        group.delivered[state] = group.delivered.get(state, 0) + 1
        self._job.trained = True
        if group.delivered[state] == len(group.names):
            self._job.safe_ticks = max(self._job.safe_ticks, state.ticks)

    # -- the exchange of state ---------------------------------------------------------------------------------

    def _share_out(self, group: Group) -> None:
        names, job = group.names, self._job
        workers = [job.workers[name] for name in names]
        progress = [
            StateVersion(
                step=w.state.ticks + (w.lineage * _LINEAGE if job.rules.lineage else 0),
                lineage=w.state.lineage,
                has_state=w.complete or w.loaded,
            )
            for w in workers
        ]
        holding = any(p.has_state for p in progress)
        assert holding or not job.trained, "training began anew although there was a state"
        furthest = max(range(len(names)), key=lambda rank: progress[rank].order()) if holding else 0
        state, at_s = workers[furthest].state, 0.0
        group.shares = {name: Share(0.01, None, state) for name in names}
        for served in transfer_rounds(progress):
            at_s += job.random.uniform(0.02, 0.3)
            for source, destination in served:
                group.shares[names[destination]] = Share(at_s, names[source], state)
        # Ranks that count as equally far keep what they have: the next step asserts that it is the same.
        for worker in workers:
            share = group.shares[worker.name]
            if share.source is None:
                group.shares[worker.name] = Share(share.at_s, None, worker.state)
                group.got.add(worker.name)

    def receive(self, spec: GenerationSpec, worker: SimWorker) -> bool:
        """Whether a worker's share of the exchange arrives, now that it is due."""
        group = self.of(spec)
        source = group.shares[worker.name].source
        if source is not None:
            sender = self._job.workers[source]
            sends = sender.responsive and sender.generation == spec.generation and sender.doing != "regrouping"
            if not sends or source not in group.got:
                return False
            group.got.add(worker.name)
        worker.state = group.shares[worker.name].state
        return True

    def due_s(self, spec: GenerationSpec, worker: SimWorker) -> float:
        """When a worker's share of the exchange is due [s after it began]."""
        return self.of(spec).shares[worker.name].at_s
