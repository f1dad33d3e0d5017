"""The job's membership as a state machine: stimuli in, instructions out; no clock, no Ray, no torch (pure).

Only this machine issues generations, and every one it issues supersedes the ones before (design, pitfall 9).
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter

from elastic_ray.events import EventKind
from elastic_ray.membership.plan import Member, Plan
from elastic_ray.membership.signals import (
    AllLost,
    Announce,
    Complete,
    Finished,
    Instruction,
    Launch,
    Left,
    Lost,
    Note,
    PrepareFailed,
    Ready,
    Release,
    Rerun,
    Reserve,
    Reserved,
    StepFailed,
    Stimulus,
    Switched,
    Target,
    Tick,
    Withdraw,
)


class Phase(enum.Enum):
    """Where a worker is in its life."""

    RESERVING = "reserving"
    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    LEAVING = "leaving"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """Times in seconds.

    Attributes:
        min_workers: fewest workers that the first generation begins with.
        reserve_timeout_s: an unfulfilled reservation is given back after this.
        join_timeout_s: a started worker that is not ready after this is given up.
        switch_timeout_s: members of an announced forced generation that are silent this long count as hung.
        patience_s: how long a change waits for further joiners that are starting.
        notice_s: how long a failed collective waits for news of who died before a generation of all is tried.
        backoff_s: pause before resources are asked for again after a reservation or a joiner failed.
    """

    min_workers: int = 1
    reserve_timeout_s: float = 60.0
    join_timeout_s: float = 120.0
    switch_timeout_s: float = 20.0
    patience_s: float = 5.0
    notice_s: float = 1.0
    backoff_s: float = 5.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Worker:
    """What the machine knows of one worker."""

    worker: str
    node: str
    phase: Phase
    since_s: float
    has_state: bool = False


@dataclasses.dataclass(slots=True, kw_only=True)
class InFlight:
    """An announced generation that not all members have entered yet."""

    plan: Plan
    forced: bool
    since_s: float
    from_workers: int
    pauses: dict[str, float] = dataclasses.field(default_factory=dict)
    failed: set[str] = dataclasses.field(default_factory=set)
    effective_s: float | None = None


class JobMembership:
    """See the module's text.

    Attributes:
        workers: every worker that exists or is asked for, by id.
        current: the generation in effect, None before the first.
        in_flight: the announced generation, None when all have entered.
    """

    def __init__(self, config: MembershipConfig) -> None:
        self._config = config
        self.workers: dict[str, Worker] = {}
        self.current: Plan | None = None
        self.in_flight: InFlight | None = None
        self._target: dict[str, int] = {}
        self._reason = ""
        self._issued = 0
        self._named = 0
        self._not_before_s = 0.0
        self._suspicion: tuple[float, str] | None = None
        self._first_wish_s: float | None = None
        self._out: list[Instruction] = []

    def handle(self, stimulus: Stimulus, now_s: float) -> list[Instruction]:
        """Take a stimulus; answer with what is to be done, in order."""
        self._out = []
        match stimulus:
            case Target(nodes=nodes, reason=reason):
                self._target = {node: count for node, count in nodes.items() if count > 0}
                self._reason = reason
            case Reserved(worker=worker):
                self._reserved(worker, now_s)
            case Ready(worker=worker, has_state=has_state):
                self._ready(worker, has_state, now_s)
            case Lost(worker=worker, cause=cause):
                self._lost(worker, cause, now_s)
            case Left(worker=worker):
                self._left(worker)
            case Finished(worker=worker):
                self._finished(worker)
            case Rerun(worker=worker):
                self._rerun(worker, now_s)
            case StepFailed(generation=generation, cause=cause):
                self._step_failed(generation, cause, now_s)
            case PrepareFailed(worker=worker, generation=generation, cause=cause):
                self._prepare_failed(worker, generation, cause, now_s)
            case Switched(worker=worker, generation=generation, pause_s=pause_s):
                self._switched(worker, generation, pause_s, now_s)
            case Tick():
                pass
        self._deadlines(now_s)
        self._reconcile(now_s)
        return self._out

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Workers of the generation in effect."""
        return self.current.world_size if self.current is not None else 0

    @property
    def generation(self) -> int:
        """Number of the generation in effect, 0 before the first."""
        return self.current.generation if self.current is not None else 0

    @property
    def target_workers(self) -> int:
        """Workers the job is heading for."""
        return sum(self._target.values())

    def held(self) -> dict[str, int]:
        """Workers with resources (reserved, or asked for) by node."""
        return dict(Counter(w.node for w in self.workers.values()))

    def _present(self) -> dict[str, int]:
        """As :meth:`held`, without those on their way out."""
        return dict(Counter(w.node for w in self.workers.values() if w.phase is not Phase.LEAVING))

    def members(self) -> list[Worker]:
        """Living members in rank order."""
        order = [m.worker for m in self.current.members] if self.current is not None else []
        rank = {worker: index for index, worker in enumerate(order)}
        living = [w for w in self.workers.values() if w.phase is Phase.MEMBER]
        return sorted(living, key=lambda w: (rank.get(w.worker, len(order)), _number(w.worker)))

    def _in(self, *phases: Phase) -> list[Worker]:
        chosen = [w for w in self.workers.values() if w.phase in phases]
        return sorted(chosen, key=lambda w: _number(w.worker))

    # -- single workers ----------------------------------------------------------------------------------------

    def _reserved(self, worker: str, now_s: float) -> None:
        record = self.workers.get(worker)
        if record is None or record.phase is not Phase.RESERVING:
            return
        record.phase, record.since_s = Phase.STARTING, now_s
        self._out.append(Launch(worker=worker, node=record.node))

    def _ready(self, worker: str, has_state: bool, now_s: float) -> None:
        record = self.workers.get(worker)
        if record is not None and record.phase is Phase.STARTING:
            record.phase, record.since_s, record.has_state = Phase.READY, now_s, has_state

    def _left(self, worker: str) -> None:
        record = self.workers.pop(worker, None)
        if record is not None:
            self._out.append(Release(worker=worker, kill=False, reason="it left its generation"))

    def _finished(self, worker: str) -> None:
        record = self.workers.get(worker)
        if record is None:
            return
        record.phase = Phase.FINISHED
        if not self._in(Phase.MEMBER):
            self._out.append(Complete())

    def _rerun(self, worker: str, now_s: float) -> None:
        record = self.workers.get(worker)
        if record is None or record.phase not in (Phase.MEMBER, Phase.READY, Phase.STARTING):
            return
        member = record.phase is Phase.MEMBER
        record.phase, record.since_s, record.has_state = Phase.STARTING, now_s, member or record.has_state
        if member:
            self._force(f"worker {worker} ran out of memory and starts over", now_s)

    def _lost(self, worker: str, cause: str, now_s: float) -> None:
        record = self.workers.pop(worker, None)
        if record is None:
            return
        self._out.append(Release(worker=worker, kill=True, reason=cause))
        flight = self.in_flight
        if record.phase is Phase.LEAVING:
            return  # its generation is over: nobody waits for it
        if record.phase is Phase.MEMBER:
            self._force(f"lost worker {worker} on node {record.node[:8]}: {cause}", now_s)
        elif record.phase is Phase.FINISHED:
            if not self._in(Phase.MEMBER):
                self._out.append(Complete())
        elif flight is not None and flight.plan.rank_of(worker) is not None:
            self._withdraw(f"joiner {worker} was lost: {cause}", now_s)
        else:
            self._not_before_s = now_s + self._config.backoff_s

    # -- generations -------------------------------------------------------------------------------------------

    def _issue(self, members: list[Worker], *, forced: bool, reason: str, now_s: float) -> None:
        # Whoever holds a trained state comes first: rank 0 reports, and holders are never outranked by newcomers.
        self._issued += 1
        plan = Plan(
            generation=self._issued,
            members=tuple(Member(worker=w.worker, node=w.node) for w in members),
            void_below=self._issued if forced else 0,
            reason=reason,
        )
        self.in_flight = InFlight(plan=plan, forced=forced, since_s=now_s, from_workers=self.world_size)
        concerned = {*(w.worker for w in members), *(w.worker for w in self._in(Phase.MEMBER))}
        self._out.append(Announce(plan=plan, to=tuple(sorted(concerned, key=_number))))

    def _force(self, cause: str, now_s: float) -> None:
        """The generation is broken: go on with its survivors, who hold the state."""
        self._suspicion = None
        survivors = self.members()
        flight = self.in_flight
        waiting = [w.worker for w in self._in(Phase.READY) if flight and flight.plan.rank_of(w.worker) is not None]
        if flight is not None and waiting:
            self._out.append(Withdraw(generation=flight.plan.generation, to=tuple(waiting)))
        if survivors:
            self._issue(survivors, forced=True, reason=cause, now_s=now_s)
            return
        self.in_flight = None
        finished = self._in(Phase.FINISHED)
        if finished:
            self._out.append(Complete())
        elif not any(w.has_state for w in self._in(Phase.STARTING, Phase.READY)):
            self._out.append(AllLost(reason=cause))
        else:
            self.current = None  # those that start over in place hold the state: the next generation is theirs

    def _withdraw(self, reason: str, now_s: float) -> None:
        """Cancel a planned change; where some rank has entered it already, replace it by force."""
        flight = self.in_flight
        if flight is None:
            return
        if flight.forced or flight.effective_s is not None:
            self._force(reason, now_s)
            return
        self.in_flight = None
        self._not_before_s = now_s + self._config.backoff_s
        concerned = {m.worker for m in flight.plan.members} | {w.worker for w in self._in(Phase.MEMBER)}
        living = sorted(concerned & self.workers.keys(), key=_number)
        self._out.append(Withdraw(generation=flight.plan.generation, to=tuple(living)))
        self._note(EventKind.CANCELLED, flight.plan.world_size, reason, generation=flight.plan.generation)

    def _step_failed(self, generation: int, cause: str, now_s: float) -> None:
        flight = self.in_flight
        if flight is not None and flight.forced and generation < flight.plan.generation:
            return  # on its way to the cure already
        if self.current is None or generation < self.current.generation:
            return
        if self._suspicion is None:
            self._suspicion = (now_s + self._config.notice_s, cause)

    def _prepare_failed(self, worker: str, generation: int, cause: str, now_s: float) -> None:
        flight = self.in_flight
        if flight is None or flight.plan.generation != generation:
            return
        if flight.forced:
            flight.failed.add(worker)
            return
        self._withdraw(f"generation {generation} could not be formed: {cause}", now_s)
        for record in self._in(Phase.READY):
            if flight.plan.rank_of(record.worker) is not None and not record.has_state:
                self._give_up(record, "its group could not be formed")

    def _switched(self, worker: str, generation: int, pause_s: float, now_s: float) -> None:
        flight, record = self.in_flight, self.workers.get(worker)
        if flight is None or flight.plan.generation != generation:
            return
        if flight.effective_s is None:
            flight.effective_s = now_s
            self.current = flight.plan
            for member in self._in(Phase.MEMBER):
                if flight.plan.rank_of(member.worker) is None:
                    member.phase, member.since_s = Phase.LEAVING, now_s
        if record is not None:
            if record.phase in (Phase.READY, Phase.STARTING):
                record.phase, record.since_s = Phase.MEMBER, now_s
            record.has_state = True
            flight.pauses[worker] = pause_s
        if all(m.worker in flight.pauses or m.worker not in self.workers for m in flight.plan.members):
            self._complete_switch(flight)

    def _complete_switch(self, flight: InFlight) -> None:
        self.in_flight = None
        started = flight.from_workers == 0
        kind = EventKind.STARTED if started else EventKind.FAILURE if flight.forced else EventKind.RESIZE
        self._out.append(
            Note(
                kind=kind,
                from_workers=flight.from_workers,
                to_workers=flight.plan.world_size,
                reason=flight.plan.reason,
                pause_s=0.0 if started else max(flight.pauses.values(), default=0.0),
                generation=flight.plan.generation,
            )
        )

    # -- deadlines ---------------------------------------------------------------------------------------------

    def _deadlines(self, now_s: float) -> None:
        config = self._config
        if self._suspicion is not None and now_s >= self._suspicion[0]:
            self._force(f"a collective failed: {self._suspicion[1]}", now_s)
        for record in self._in(Phase.RESERVING):
            if now_s - record.since_s > config.reserve_timeout_s:
                self._not_before_s = now_s + config.backoff_s
                self._give_up(record, f"node {record.node[:8]} did not free its resources in time")
        for record in self._in(Phase.LEAVING):
            if now_s - record.since_s > config.switch_timeout_s:
                self._lost(record.worker, "its train function did not unwind in time", now_s)
        for record in self._in(Phase.STARTING):
            if now_s - record.since_s > config.join_timeout_s:
                self._not_before_s = now_s + config.backoff_s
                self._give_up(record, f"it was not ready within join_timeout_s={config.join_timeout_s:.0f}")
        flight = self.in_flight
        if flight is None:
            return
        begun_s = flight.since_s if flight.forced else flight.effective_s
        if begun_s is None or now_s - begun_s <= config.switch_timeout_s:
            return
        silent = [
            m.worker
            for m in flight.plan.members
            if m.worker in self.workers and m.worker not in flight.pauses and m.worker not in flight.failed
        ]
        for worker in silent:
            self._lost(worker, f"it did not enter generation {flight.plan.generation} in time", now_s)
        if not silent:
            self._force(f"generation {flight.plan.generation} could not be formed", now_s)

    def _give_up(self, record: Worker, reason: str) -> None:
        del self.workers[record.worker]
        self._out.append(Release(worker=record.worker, kill=True, reason=reason))
        self._note(EventKind.CANCELLED, self.world_size + 1, f"worker {record.worker} was given up: {reason}")

    # -- towards the target ------------------------------------------------------------------------------------

    def _reconcile(self, now_s: float) -> None:
        if self._in(Phase.FINISHED):
            return  # the job is ending
        leavers = self._drop_surplus()
        self._ask_for_missing(now_s)
        if self.in_flight is None and self._suspicion is None:
            self._change(leavers, now_s)

    def _drop_surplus(self) -> list[Worker]:
        """Give back what is not wanted any more; returns the members that are to leave."""
        leavers: list[Worker] = []
        rank = {w.worker: index for index, w in enumerate(self.members())}
        flying = {m.worker for m in self.in_flight.plan.members} if self.in_flight is not None else set()
        for node, count in self._present().items():
            surplus = count - self._target.get(node, 0)
            if surplus <= 0:
                continue
            here = [w for w in self.workers.values() if w.node == node and w.phase is not Phase.LEAVING]
            # Newest first, and members last: what has not joined costs nothing to give back.
            here.sort(
                key=lambda w: (w.phase is not Phase.MEMBER, rank.get(w.worker, 0), _number(w.worker)),
                reverse=True,
            )
            for record in here[:surplus]:
                if record.phase is Phase.MEMBER:
                    leavers.append(record)
                elif record.worker not in flying and not record.has_state:
                    del self.workers[record.worker]
                    self._out.append(Release(worker=record.worker, kill=True, reason="it is not wanted any more"))
        return leavers

    def _ask_for_missing(self, now_s: float) -> None:
        if now_s < self._not_before_s:
            return
        held = self._present()
        for node, wanted in sorted(self._target.items()):
            for _ in range(wanted - held.get(node, 0)):
                self._named += 1
                worker = f"w{self._named}"
                self.workers[worker] = Worker(worker=worker, node=node, phase=Phase.RESERVING, since_s=now_s)
                self._out.append(Reserve(worker=worker, node=node))

    def _change(self, leavers: list[Worker], now_s: float) -> None:
        """Announce the next planned generation once it is worth it."""
        joiners = self._in(Phase.READY)
        if not joiners and not leavers:
            self._first_wish_s = None
            return
        if self._first_wish_s is None:
            self._first_wish_s = now_s
        starting = self._in(Phase.STARTING)
        patient = bool(starting) and now_s - self._first_wish_s < self._config.patience_s
        if self.current is None:
            self._begin(joiners, patient, now_s)
            return
        leaving = {w.worker for w in leavers}
        members = self.members()
        stayers = [w for w in members if w.worker not in leaving]
        if not stayers and members:
            stayers, leaving = (
                members[:1],
                leaving - {members[0].worker},
            )  # somebody must bring the state along
        group = stayers + joiners
        too_small = len(group) < min(self._config.min_workers, len(members)) and bool(
            self._in(Phase.STARTING, Phase.RESERVING)
        )
        if patient or too_small or [w.worker for w in group] == [w.worker for w in members]:
            return
        self._first_wish_s = None
        self._issue(group, forced=False, reason=self._reason, now_s=now_s)

    def _begin(self, joiners: list[Worker], patient: bool, now_s: float) -> None:
        """The first generation, or the first after all members were lost."""
        if patient or len(joiners) < min(self._config.min_workers, max(1, self.target_workers)):
            return
        joiners.sort(key=lambda w: not w.has_state)
        self._first_wish_s = None
        self._issue(joiners, forced=False, reason=self._reason, now_s=now_s)

    def reset(self) -> list[Instruction]:
        """Give back every worker, before a restart from a checkpoint; the target stays."""
        released = [Release(worker=w, kill=True, reason="the job restarts") for w in self.workers]
        self.workers.clear()
        self.current = self.in_flight = self._suspicion = self._first_wish_s = None
        self._not_before_s = 0.0
        return list(released)

    def _note(self, kind: EventKind, to_workers: int, reason: str, *, generation: int = 0) -> None:
        self._out.append(
            Note(
                kind=kind,
                from_workers=self.world_size,
                to_workers=to_workers,
                reason=reason,
                generation=generation or (self.current.generation if self.current is not None else 0),
            )
        )


def _number(worker: str) -> int:
    return int(worker[1:])
