"""The job's membership as a state machine: stimuli in, instructions out; no clock, no Ray, no torch (pure).

Only this machine issues generations, and every one it issues supersedes the ones before (docs/protocol.md, pitfall 9).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from elastic_ray.events import EventKind
from elastic_ray.membership.plan import Member, Plan
from elastic_ray.membership.recovery import Witness, recover
from elastic_ray.membership.roster import InFlight, Phase, Roster, Worker, number
from elastic_ray.membership.selection import first_group, next_group, surplus
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

_MOST_PATIENCE = 8.0  # times join_timeout_s
_UNKNOWN = 4  # generations that a controller may have announced in its last moments


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """Times in seconds.

    Attributes:
        min_workers: fewest workers that the first generation begins with.
        reserve_timeout_s: an unfulfilled reservation is given back after this.
        join_timeout_s: a started worker that is not ready after this is given up; the next ones have twice as long
            each time, up to eight times, until one is ready.
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Deadline:
    """When to act on something, what it was, and the generation it happened in."""

    at_s: float
    cause: str
    generation: int = 0


class JobMembership(Roster):
    """See the module's text; its attributes are the roster's."""

    def __init__(self, config: MembershipConfig, *, first_most: int = 0, named: int = 0) -> None:
        """Begin without workers. ``issued`` is the number of the latest generation that was announced.

        Args:
            config: times.
            first_most: most workers that the first generation can have where its loader stands; 0 for no limit.
            named: number of the last worker of a job that the same controller ran before: names are not used twice.
        """
        super().__init__()
        self.config = config
        self._first_most = first_most
        self._target: dict[str, int] = {}
        self._reason = ""
        self._loaded = 0  # steps of the furthest automatic checkpoint that was loaded for this start
        self._bereft = False  # a member was lost since the target was set: who joins now replaces it
        self.issued = 0
        self.named = named
        self.announced: tuple[str, ...] = ()
        self.trained = False
        self._not_before_s = 0.0
        self._retry_s = 0.0
        self._patience = 1.0  # times join_timeout_s: on a busy machine, starting anew is what keeps it busy
        self._suspicion: _Deadline | None = None
        self._hope: _Deadline | None = None
        self._first_wish_s: float | None = None
        self._ended = False
        self._out: list[Instruction] = []

    def handle(self, stimulus: Stimulus, now_s: float) -> list[Instruction]:
        """Take a stimulus; answer with what is to be done, in order. Nothing follows the end before a reset."""
        self._out = []
        if self._ended:
            return self._out
        match stimulus:
            case Target():
                self._aim(stimulus)
            case Reserved(worker=worker):
                self._reserved(worker, now_s)
            case Ready():
                self._ready(stimulus, now_s)
            case Lost(worker=worker, cause=cause):
                self._lost(worker, cause, now_s)
            case Left(worker=worker):
                self._left(worker, now_s)
            case Finished(worker=worker):
                self._finished(worker)
            case Rerun(worker=worker, has_state=has_state):
                self._rerun(worker, has_state, now_s)
            case StepFailed(worker=worker, generation=generation, cause=cause):
                self._step_failed(worker, generation, cause, now_s)
            case PrepareFailed(worker=worker, generation=generation, cause=cause):
                self._prepare_failed(worker, generation, cause, now_s)
            case Switched(worker=worker, generation=generation, pause_s=pause_s):
                self._switched(worker, generation, pause_s, now_s)
            case Tick():
                pass
        if not self._ended:
            self._deadlines(now_s)
        if not self._ended:
            self._reconcile(now_s)
        return self._out

    def take_over(
        self,
        witnesses: Sequence[Witness],
        target: Target,
        *,
        issued: int,
        world_size: int,
        announced: Collection[str],
        trained: bool,
        now_s: float,
    ) -> list[Instruction]:
        """Go on after the controller's process was restarted, with the workers that live.

        Args:
            witnesses: the workers that live.
            target: where the job was heading.
            issued: the latest generation that was noted down; later ones are known from the workers.
            world_size: workers of the generation in effect, as noted down.
            announced: members of the latest generation that was announced since the last start, as noted down; without
                one of them now, all were lost, for they may have trained.
            trained: whether one had taken effect; without a worker that holds the state, all of them were lost.
            now_s: the time [s].
        """
        self._aim(target)
        found = recover(witnesses, world_size=world_size, now_s=now_s)
        self.workers, self.current, self.in_flight = found.workers, found.current, found.in_flight
        # A generation may have been announced and neither noted down nor entered: its number is not used again.
        self.issued = max(issued, found.issued) + _UNKNOWN
        self.named = max([self.named, *map(number, self.workers)])
        self.trained = trained or found.current is not None or found.in_flight is not None
        self.announced = tuple(announced)
        self._loaded = max((record.loaded for record in self.workers.values()), default=0)
        trains = self.trained or (announced and not any(w.worker in announced for w in witnesses))
        if trains and not self._may_go_on():
            self.current = self.in_flight = None
            self._out = []
            self._end(AllLost(reason="all workers were lost while the controller was away"))
            return self._out
        kept = found.in_flight.plan.generation if found.in_flight is not None else 0
        in_effect = found.current.generation if found.current is not None else 0
        living = tuple(w.worker for w in witnesses)
        unentered = range(max(in_effect, self.issued - 2 * _UNKNOWN) + 1, self.issued + 1)
        out: list[Instruction] = [Withdraw(generation=each, to=living) for each in unentered if each != kept]
        for stimulus in found.since:
            out += self.handle(stimulus, now_s)
        if found.gone:
            self._out, self._bereft = [], True
            self._force(f"lost {', '.join(found.gone)} while the controller was away", now_s)
            out += self._out
        return out + self.handle(Tick(), now_s)

    @property
    def target_workers(self) -> int:
        """Workers the job is heading for."""
        return sum(self._target.values())

    def _may_go_on(self) -> bool:
        return any(record.has_state for record in self.workers.values() if record.phase is not Phase.LEAVING)

    def _aim(self, goal: Target) -> None:
        target = {node: count for node, count in goal.nodes.items() if count > 0}
        if target != self._target:
            self._bereft = False
        self._target, self._reason = target, goal.reason

    # -- single workers ----------------------------------------------------------------------------------------

    def _reserved(self, worker: str, now_s: float) -> None:
        record = self.workers.get(worker)
        if record is None or record.phase is not Phase.RESERVING:
            return
        record.phase, record.since_s = Phase.STARTING, now_s
        self._out.append(Launch(worker=worker, node=record.node))

    def _ready(self, told: Ready, now_s: float) -> None:
        record = self.workers.get(told.worker)
        if record is None:
            return
        if record.phase is Phase.STARTING:
            record.phase, record.since_s, record.loaded = Phase.READY, now_s, told.loaded
            self._patience = 1.0
            self._loaded = max(self._loaded, told.loaded)
            record.has_state = told.has_state or record.has_state
        elif record.phase is Phase.MEMBER:
            record.rebuilt = True  # it starts over, and its Rerun was overtaken

    def _left(self, worker: str, now_s: float) -> None:
        record = self.workers.pop(worker, None)
        if record is None:
            return
        self._out.append(Release(worker=worker, kill=False, reason="it left its generation"))
        flight = self.in_flight
        # It may be the first to speak of the planned generation that it is no part of.
        expected = flight is not None and not flight.forced and flight.plan.rank_of(worker) is None
        if record.phase is not Phase.LEAVING and not expected:
            self._bereave(record, "it left", now_s)

    def _finished(self, worker: str) -> None:
        record = self.workers.get(worker)
        if record is None:
            return
        record.phase = Phase.FINISHED
        if not self.in_phase(Phase.MEMBER) and not self.entering():
            self._end(Complete())

    def _rerun(self, worker: str, has_state: bool, now_s: float) -> None:
        record = self.workers.get(worker)
        if record is None or record.phase not in (Phase.MEMBER, Phase.READY, Phase.STARTING):
            return
        before, record.has_state = record.phase, has_state
        record.phase, record.since_s = Phase.READY if record.rebuilt else Phase.STARTING, now_s
        record.rebuilt, record.held = False, self.generation if has_state else 0
        # Were it to hear only now of a generation that was announced to it before, it might enter it alone.
        for generation in range(max(1, self.generation), self.issued + 1):
            self._out.append(Withdraw(generation=generation, to=(worker,)))
        cause = f"worker {worker} ran out of memory and starts over"
        if before is Phase.MEMBER:
            self._force(cause, now_s)
        elif self.is_planned(worker):
            self._withdraw(cause, now_s)

    def _lost(self, worker: str, cause: str, now_s: float) -> None:
        record = self.workers.pop(worker, None)
        if record is None:
            return
        self._out.append(Release(worker=worker, kill=True, reason=cause))
        if record.phase is not Phase.LEAVING:  # its generation is over: nobody waits for it
            self._bereave(record, cause, now_s)

    def _bereave(self, record: Worker, cause: str, now_s: float) -> None:
        """Go on without a worker that was not expected to go."""
        if record.phase is Phase.MEMBER:
            self._bereft = True
            self._force(f"lost worker {record.worker} on node {record.node[:8]}: {cause}", now_s)
        elif record.phase is Phase.FINISHED:
            if not self.in_phase(Phase.MEMBER) and not self.entering():
                self._end(Complete())
        elif self.is_planned(record.worker):
            self._withdraw(f"joiner {record.worker} was lost: {cause}", now_s)
        else:
            self._not_before_s = now_s + self.config.backoff_s
        self._check_state(record, cause)

    def _check_state(self, gone: Worker, cause: str) -> None:
        """After all members were lost, those that started over in place were the last to hold the state."""
        idle = self.current is None and self.in_flight is None
        if gone.has_state and idle and not self.holders() and not self._ended:
            self._end(AllLost(reason=f"lost worker {gone.worker}, the last that held the state: {cause}"))

    def _end(self, last: AllLost | Complete) -> None:
        self._ended = True
        self._out.append(last)

    # -- generations -------------------------------------------------------------------------------------------

    def _issue(self, members: list[Worker], *, forced: bool, reason: str, now_s: float) -> None:
        # Whoever holds a trained state comes first: rank 0 reports, and holders are never outranked by newcomers.
        self.issued, self.announced = self.issued + 1, tuple(w.worker for w in members)
        plan = Plan(
            generation=self.issued,
            members=tuple(Member(worker=w.worker, node=w.node) for w in members),
            void_below=self.issued if forced or self.current is None else 0,
            reason=reason,
        )
        self.in_flight = InFlight(
            plan=plan,
            forced=forced,
            since_s=now_s,
            from_workers=self.world_size,
            from_state=any(w.has_state for w in members),
            loaded=max(w.loaded for w in members),
        )
        concerned = {*(w.worker for w in members), *(w.worker for w in self.in_phase(Phase.MEMBER))}
        self._out.append(Announce(plan=plan, to=tuple(sorted(concerned, key=number))))

    def _force(self, cause: str, now_s: float) -> None:
        """The generation is broken: go on with its survivors, who hold the state.

        Where the change to it was under way, its joiners are among them: they may have trained in it already, and
        a worker that has must not be left behind with a state that differs from the others'.
        """
        self._suspicion = None
        flight, planned = self.in_flight, self.planned()
        survivors = sorted([*self.members(), *self.entering()], key=lambda w: not w.has_state)
        # Nothing has been trained yet (and some survivor has loaded what the others had), or its joiners hold it.
        fresh = flight is not None and not flight.from_state and any(w.loaded >= flight.loaded for w in survivors)
        if survivors and (fresh or any(w.has_state for w in survivors)) and not self._behind(survivors):
            self._hope = None
            self._call_off(planned[: 0 if flight and flight.begun else None])
            self._issue(survivors, forced=True, reason=cause, now_s=now_s)
        elif self.in_phase(Phase.FINISHED):
            self._end(Complete())
        elif self.holders():
            self._call_off(planned)
            self._idle()  # those that start over in place hold the state: the next generation is theirs
        elif planned:
            # A joiner may hold the state by now: with its group called off, it says so, or it has none.
            if self._hope is None:
                self._hope = _Deadline(now_s + self.config.notice_s, cause)
                self._call_off(planned)
        else:
            self._end(AllLost(reason=cause))

    def _behind(self, survivors: Sequence[Worker]) -> bool:
        """Whether all of them only were about to take over a state that one which starts over in place holds now."""
        if any(w.phase is Phase.MEMBER for w in survivors):
            return False
        held = max(w.held for w in survivors)
        return any(w.held > held for w in self.holders() if w not in survivors)

    def _call_off(self, joiners: list[Worker]) -> None:
        if self.in_flight is not None and joiners:
            to = tuple(w.worker for w in joiners)
            self._out.append(Withdraw(generation=self.in_flight.plan.generation, to=to))

    def _idle(self) -> None:
        self.current = self.in_flight = self._hope = None

    def _withdraw(self, reason: str, now_s: float) -> None:
        """Cancel a planned change; where some rank has entered it already, replace it by force."""
        flight = self.in_flight
        if flight is None:
            return
        if flight.begun or self._hope is not None:
            self._force(reason, now_s)
            return
        self.in_flight = None
        self._not_before_s = now_s + self.config.backoff_s
        concerned = {m.worker for m in flight.plan.members} | {w.worker for w in self.in_phase(Phase.MEMBER)}
        living = sorted(concerned & self.workers.keys(), key=number)
        self._out.append(Withdraw(generation=flight.plan.generation, to=tuple(living)))
        self._note(EventKind.CANCELLED, flight.plan.world_size, reason, generation=flight.plan.generation)

    def _step_failed(self, worker: str, generation: int, cause: str, now_s: float) -> None:
        flight, record = self.in_flight, self.workers.get(worker)
        if record is None:
            return
        record.failed_in = max(record.failed_in, generation)
        if record.phase is Phase.LEAVING:
            self._lost(worker, f"it could not leave: {cause}", now_s)
            return
        if record.phase is Phase.READY:
            self._entered(record, generation, now_s)
            if self._hope is not None and flight is not None and flight.plan.generation == generation:
                flight.effective_s = now_s
                self._force(self._hope.cause, now_s)
                return
        if flight is not None and flight.forced and generation < flight.plan.generation:
            return  # on its way to the cure already
        entering = flight is not None and flight.plan.generation == generation
        present = self.current is not None and generation >= self.generation
        if (entering or present) and self._suspicion is None:
            self._suspicion = _Deadline(now_s + self.config.notice_s, cause, generation)

    def _entered(self, record: Worker, generation: int, now_s: float) -> None:
        """A joiner speaks as one that holds a state. Where the others went on without it, it is of no use to them."""
        record.has_state = True
        flight = self.in_flight
        expected = flight is not None and (flight.plan.generation == generation or record in self.entering())
        if not expected and len(self.holders()) > 1 and self._hope is None:
            planned = self.is_planned(record.worker)
            self._give_up(record, f"it holds the state of generation {generation}, which was called off")
            if planned:
                self._withdraw(f"joiner {record.worker} was given up", now_s)

    def _prepare_failed(self, worker: str, generation: int, cause: str, now_s: float) -> None:
        flight = self.in_flight
        if flight is None or flight.plan.generation != generation or self._hope is not None:
            return
        if flight.begun:
            flight.failed.add(worker)
            if self._suspicion is None and not self.silent(flight):
                self._suspicion = _Deadline(now_s + self.config.notice_s, cause, generation)
            return
        self._try_again(f"generation {generation} could not be formed: {cause}", now_s)

    def _try_again(self, cause: str, now_s: float) -> None:
        """Cancel a planned change that nobody entered, for no fault that is known."""
        joiners = self.planned()
        self._withdraw(cause, now_s)
        # Whoever is to blame may be dead already: wait for the news before the others are tried again, once.
        self._retry_s = now_s + self.config.notice_s
        for record in joiners:
            record.failures += 1
            if record.failures > 1:
                self._give_up(record, "its group could not be formed")

    def _switched(self, worker: str, generation: int, pause_s: float, now_s: float) -> None:
        flight, record = self.in_flight, self.workers.get(worker)
        if record is not None and record.phase is Phase.READY:
            self._entered(record, generation, now_s)
        if flight is None or flight.plan.generation != generation:
            return
        if flight.effective_s is None:
            self._take_effect(flight, now_s)
        if record is not None:
            if record.phase is Phase.READY:
                record.phase, record.since_s, record.failures = Phase.MEMBER, now_s, 0
            flight.pauses[worker] = pause_s
        if self._hope is not None:
            self._force(self._hope.cause, now_s)
        elif not self.silent(flight) and not flight.failed & self.workers.keys():
            self._complete_switch(flight)

    def _take_effect(self, flight: InFlight, now_s: float) -> None:
        before, self.current, flight.effective_s = self.generation, flight.plan, now_s
        self.trained = True
        if self._suspicion is not None and self._suspicion.generation < flight.plan.generation:
            self._suspicion = None  # whoever failed in the generation before is cured by this one
        for member in self.in_phase(Phase.MEMBER):
            if flight.plan.rank_of(member.worker) is not None:
                continue
            member.phase, member.since_s = Phase.LEAVING, now_s
            if member.failed_in >= before:
                self._lost(member.worker, "its last step failed", now_s)  # it waits for a generation in vain

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
        config = self.config
        if self._hope is not None and now_s >= self._hope.at_s:
            if not self.holders():
                self._end(AllLost(reason=self._hope.cause))
                return
            self._idle()
        if self._suspicion is not None and now_s >= self._suspicion.at_s:
            self._force(f"a collective failed: {self._suspicion.cause}", now_s)
        for record in self.in_phase(Phase.RESERVING):
            if now_s - record.since_s > config.reserve_timeout_s:
                self._not_before_s = now_s + config.backoff_s
                self._give_up(record, f"node {record.node[:8]} did not free its resources in time")
        for record in self.in_phase(Phase.LEAVING):
            if now_s - record.since_s > config.switch_timeout_s:
                self._lost(record.worker, "its train function did not unwind in time", now_s)
        limit_s = config.join_timeout_s * self._patience
        late = [record for record in self.in_phase(Phase.STARTING) if now_s - record.since_s > limit_s]
        for record in late:
            self._not_before_s = now_s + config.backoff_s
            times = f" x {self._patience:g}" if self._patience > 1 else ""
            self._give_up(record, f"it was not ready within join_timeout_s={config.join_timeout_s:.0f}{times}")
        if late:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        if self.in_flight is not None and self._hope is None and not self._ended:
            self._flight_deadline(self.in_flight, now_s)

    def _flight_deadline(self, flight: InFlight, now_s: float) -> None:
        # A planned change waits for the step at which all ranks agree; the first one has none to wait for.
        begun_s = flight.since_s if flight.forced or not flight.from_workers else flight.effective_s
        if begun_s is None or now_s - begun_s <= self.config.switch_timeout_s:
            return
        if not flight.begun:
            self._try_again(f"generation {flight.plan.generation} was not entered in time", now_s)
            return
        silent = self.silent(flight)
        cause = f"it did not enter generation {flight.plan.generation} in time"
        for record in silent:
            del self.workers[record.worker]
            self._out.append(Release(worker=record.worker, kill=True, reason=cause))
        names = ", ".join(w.worker for w in silent)
        self._force(
            f"lost {names}: {cause}" if silent else f"generation {flight.plan.generation} could not be formed", now_s
        )

    def _give_up(self, record: Worker, reason: str) -> None:
        del self.workers[record.worker]
        self._out.append(Release(worker=record.worker, kill=True, reason=reason))
        self._note(EventKind.CANCELLED, self.world_size + 1, f"worker {record.worker} was given up: {reason}")
        self._check_state(record, reason)

    # -- towards the target ------------------------------------------------------------------------------------

    def _reconcile(self, now_s: float) -> None:
        if self.in_phase(Phase.FINISHED):
            return  # the job is ending
        leavers, unwanted = surplus(self, self._target)
        for record in unwanted:
            del self.workers[record.worker]
            self._out.append(Release(worker=record.worker, kill=True, reason="it is not wanted any more"))
        self._ask_for_missing(now_s)
        if self.in_flight is None and self._suspicion is None and now_s >= self._retry_s:
            self._change(leavers, now_s)

    def _ask_for_missing(self, now_s: float) -> None:
        if now_s < self._not_before_s:
            return
        held = self.present()
        for node, wanted in sorted(self._target.items()):
            for _ in range(wanted - held.get(node, 0)):
                self.named += 1
                worker = f"w{self.named}"
                self.workers[worker] = Worker(worker=worker, node=node, phase=Phase.RESERVING, since_s=now_s)
                self._out.append(Reserve(worker=worker, node=node))

    def _change(self, leavers: list[Worker], now_s: float) -> None:
        """Announce the next planned generation once it is worth it."""
        joiners = self.in_phase(Phase.READY)
        if not joiners and not leavers:
            self._first_wish_s = None
            return
        if self._first_wish_s is None:
            self._first_wish_s = now_s
        # Who leaves while others come saves the job a pause, and a time at a smaller size, by waiting for them.
        coming = self.in_phase(Phase.STARTING, Phase.RESERVING) if leavers else self.in_phase(Phase.STARTING)
        patient = bool(coming) and now_s - self._first_wish_s < self.config.patience_s
        reason = self._reason
        if self.current is None:
            wanted = min(self.config.min_workers, max(1, self.target_workers))
            group = first_group(self, wanted=wanted, most=self._first_most, patient=patient)
            if group is not None and not self.holders() and group[0].loaded < self._loaded:
                self._loaded = 0  # they would begin anew; others in their place may load what is there
                for record in group:
                    self._give_up(record, "it could not load the automatic checkpoint that another had loaded")
                return
        else:
            group = next_group(self, leavers, min_workers=self.config.min_workers)
            if group == self.members():
                self._first_wish_s = None
                return
            group = None if patient else group
            reason = f"in place of lost workers; {reason}" if self._bereft and joiners else reason
        if group is not None:
            self._first_wish_s, self._bereft = None, False
            self._issue(group, forced=False, reason=reason, now_s=now_s)

    def reset(self, *, first_most: int = 0) -> list[Instruction]:
        """Give back every worker, before a restart from a checkpoint; the target stays. Arguments as at first."""
        self._first_most, self._loaded = first_most, 0
        self.announced, self.trained = (), False
        released = [Release(worker=w, kill=True, reason="the job restarts") for w in self.workers]
        self.workers.clear()
        self._idle()
        self._suspicion = self._first_wish_s = None
        self._not_before_s = self._retry_s = 0.0
        self._ended = False
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
