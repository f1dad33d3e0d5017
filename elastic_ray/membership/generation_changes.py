"""Changes of generation: how generations are announced, entered, broken, replaced or cancelled (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic_ray.events import EventKind
from elastic_ray.membership.instructions import AllLost, Announce, Complete, Instruction, Note, Release, Withdraw
from elastic_ray.membership.messages import GenerationSpec, Member, Returned
from elastic_ray.membership.roster import InFlight, Roster, WorkerPhase, WorkerRecord, number
from elastic_ray.membership.signals import PrepareFailed, StepFailed, Switched
from placement.cluster.sizes import ANY_SIZE, AllowedSizes
from placement.text import count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """Configuration of the membership machine. All times are in seconds."""

    min_workers: int = 1  # fewest workers that the first generation begins with
    sizes: AllowedSizes = ANY_SIZE  # of groups that are planned
    reserve_timeout_s: float = 60.0  # an unfulfilled reservation is given back after this
    # a started worker that is not ready after this is given up; the next ones have twice as long each time, up to eight
    # times, until one is ready
    join_timeout_s: float = 120.0
    switch_timeout_s: float = 20.0  # members of an announced forced generation that are silent this long count as hung
    patience_s: float = 5.0  # how long a change waits for further joiners that are starting
    notice_s: float = 1.0  # how long a failed collective waits for news of who died before a generation of all is tried
    # pause before resources are asked for again after a reservation or a joiner failed; twice as long with each joiner
    # that fails within ``remember_s`` of the pause before, up to ``remember_s``
    backoff_s: float = 5.0
    remember_s: float = 600.0  # so long after such a pause, the next joiner that fails is the first again
    replace_again_s: float = 600.0  # pause before a member is replaced again after no other worker was to be had


@dataclasses.dataclass(frozen=True, slots=True)
class _Deadline:
    """Deadline for an action, with its cause and the generation it belongs to."""

    at_s: float
    cause: str
    generation: int = 0


class GenerationChanges(Roster):
    """Base class of :class:`elastic_ray.membership.machine.JobMembership` that announces and cancels generations.

    Args:
        named: Highest worker number used by an earlier job under the same controller; numbers are not reused.
    """

    def __init__(self, config: MembershipConfig, *, named: int = 0) -> None:
        super().__init__()
        self.config = config
        self.issued = 0  # number of the latest generation that was announced
        self.named = named  # number of the latest worker that was asked for
        self.announced: tuple[str, ...] = ()  # members of the latest generation that was announced since the last start
        self.trained = False  # whether one has taken effect since then
        self.change_s = 0.0  # longest time from the announcement of a planned change until all had entered it
        self.returned: dict[str, Returned] = {}  # workers whose train function has returned, also if gone since
        self._short = 0  # workers of the announced generation, if that has fewer than the job's memory asks for
        self._bereft = False  # a member was lost since the target was set: who joins now replaces it
        self._losses: tuple[int, tuple[str, ...]] = 0, ()  # a generation, and members that it has lost
        self._not_before_s = 0.0
        self._failed_joiners, self._joiner_rested_s = 0, 0.0
        self._retry_s = self._replace_after_s = 0.0
        self._suspicion: _Deadline | None = None
        self._hope: _Deadline | None = None
        self._ended = False
        self._out: list[Instruction] = []

    def _lost(self, worker: str, cause: str, now_s: float, *, newcomer: bool = False) -> None:
        """Remove a lost worker and react to its loss."""
        record = self.workers.pop(worker, None)
        if record is None:
            return
        if newcomer:
            self._rest_after_joiner(now_s)
        self._out.append(Release(worker=worker, kill=True, reason=cause))
        if record.phase is not WorkerPhase.LEAVING:  # its generation is over: no member waits for it
            self._bereave(record, cause, now_s)

    def _rest_after_joiner(self, now_s: float) -> None:
        """Delay the next joiner after a joiner has failed; the delay doubles with each recent failure."""
        recent = now_s - self._joiner_rested_s <= self.config.remember_s
        self._failed_joiners = self._failed_joiners + 1 if recent else 1
        rest_s = min(self.config.backoff_s * 2 ** min(self._failed_joiners - 1, 20), self.config.remember_s)
        self._joiner_rested_s = now_s + rest_s
        self._not_before_s = max(self._not_before_s, self._joiner_rested_s)

    def _bereave(self, record: WorkerRecord, cause: str, now_s: float) -> None:
        """React to a worker's unexpected loss."""
        if record.phase is WorkerPhase.MEMBER:
            self._bereft = True
            self._record_loss(record, cause)
            self._force(f"lost worker {record.worker} on node {record.node[:8]}: {cause}", now_s)
        elif record.phase is WorkerPhase.FINISHED:
            if not self.in_phase(WorkerPhase.MEMBER) and not self.entering():
                self._end(Complete())
        elif self.is_planned(record.worker):
            self._withdraw(f"joiner {record.worker} was lost: {cause}", now_s)
        else:
            self._not_before_s = max(self._not_before_s, now_s + self.config.backoff_s)
        self._check_state(record, cause)

    def _record_loss(self, record: WorkerRecord, cause: str) -> None:
        """Record a member that the current generation has lost; losses stay in order."""
        generation = self.current.generation if self.current is not None else 0
        lost = self._losses[1] if self._losses[0] == generation else ()
        self._losses = generation, (*lost, f"worker {record.worker} on node {record.node[:8]}: {cause}")

    def _all_lost(self, cause: str) -> AllLost:
        """Return the instruction for the loss of all workers with state; its reason names workers lost together."""
        lost = self._losses[1]
        return AllLost(reason=f"lost all {len(lost)} workers: {'; '.join(lost)}" if len(lost) > 1 else cause)

    def _check_state(self, gone: WorkerRecord, cause: str) -> None:
        """End the job if the lost worker was the last with state and no group is left."""
        idle = self.current is None and self.in_flight is None
        if gone.has_state and idle and not self.holders() and not self._ended:
            self._end(AllLost(reason=f"lost worker {gone.worker}, the last that held the state: {cause}"))

    def _end(self, last: AllLost | Complete) -> None:
        self._ended = True
        self._note_superseded()
        self._out.append(last)

    def _issue(self, members: list[WorkerRecord], *, forced: bool, reason: str, now_s: float) -> None:
        """Announce the next generation with these members, in rank order.

        Members that hold a trained state must come first: rank 0 reports, and newcomers must not outrank them.
        """
        self.issued, self.announced = self.issued + 1, tuple(w.worker for w in members)
        spec = GenerationSpec(
            generation=self.issued,
            members=tuple(Member(worker=w.worker, node=w.node) for w in members),
            void_below=self.issued if forced or self.current is None else 0,
            reason=reason,
            returned=tuple(self.returned.values()),
        )
        self._note_superseded()
        self.in_flight = InFlight(
            spec=spec,
            forced=forced,
            since_s=now_s,
            from_workers=self.world_size,
            from_state=any(w.has_state for w in members),
            loaded=max(w.loaded for w in members),
        )
        concerned = {*(w.worker for w in members), *(w.worker for w in self.in_phase(WorkerPhase.MEMBER))}
        self._out.append(Announce(spec=spec, to=tuple(sorted(concerned, key=number))))
        self._check_memory(len(members))

    def _check_memory(self, workers: int) -> None:
        """Warn, once per size, about a group that is too small for the job's memory need but continues anyway."""
        need = self.config.sizes.memory
        short = workers if need is not None and workers < need.least_workers else 0
        if need is not None and short and short != self._short:
            self._emit(
                EventKind.WARNING,
                workers,
                f"the job continues with {count(workers)}, fewer than the {need.least_workers} that its memory needs, "
                f"until the allocator has decided again: {need.shortage(workers)}",
                generation=self.issued,
            )
        self._short = short

    def _force(self, cause: str, now_s: float) -> None:
        """Force a generation of the survivors, which hold the state, because the current generation is broken.

        If a change was in progress, its joiners are included: they may already have trained in the new generation, and
        such a worker must not be left behind with a state that differs from the other workers'.
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
        elif self.returned:
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
            self._end(self._all_lost(cause))

    def _behind(self, survivors: Sequence[WorkerRecord]) -> bool:
        """True if a worker restarting in its process holds a newer state than `survivors`, none of them members."""
        if any(w.phase is WorkerPhase.MEMBER for w in survivors):
            return False
        newest = max(w.state_generation for w in survivors)
        return any(w.state_generation > newest for w in self.holders() if w not in survivors)

    def _call_off(self, joiners: list[WorkerRecord]) -> None:
        if self.in_flight is not None and joiners:
            to = tuple(w.worker for w in joiners)
            self._out.append(Withdraw(generation=self.in_flight.spec.generation, to=to))

    def _idle(self) -> None:
        self._note_superseded()
        self.current = self.in_flight = self._hope = None

    def _withdraw(self, reason: str, now_s: float) -> None:
        """Cancel a planned change; if any rank has already entered it, replace it with a forced generation."""
        flight = self.in_flight
        if flight is None:
            return
        if flight.begun or self._hope is not None:
            self._force(reason, now_s)
            return
        self.in_flight = None
        self._not_before_s = max(self._not_before_s, now_s + self.config.backoff_s)
        concerned = {m.worker for m in flight.spec.members} | {w.worker for w in self.in_phase(WorkerPhase.MEMBER)}
        living = sorted(concerned & self.workers.keys(), key=number)
        self._out.append(Withdraw(generation=flight.spec.generation, to=tuple(living)))
        self._emit(EventKind.CANCELLED, flight.spec.world_size, reason, generation=flight.spec.generation)

    def _step_failed(self, told: StepFailed, now_s: float) -> None:
        """Handle a failed collective: unless a death is reported soon, a generation of all members is forced."""
        worker, generation, cause = told.worker, told.generation, told.cause
        flight, record = self.in_flight, self.workers.get(worker)
        if record is None:
            return
        record.failed_in = max(record.failed_in, generation)
        if record.phase is WorkerPhase.LEAVING:
            self._lost(worker, f"it could not leave: {cause}", now_s)
            return
        if record.phase is WorkerPhase.READY:
            self._entered(record, generation, now_s)
            if self._hope is not None and flight is not None and flight.spec.generation == generation:
                flight.effective_s = now_s
                self._force(self._hope.cause, now_s)
                return
        if flight is not None and flight.forced and generation < flight.spec.generation:
            return  # on its way to the cure already
        entering = flight is not None and flight.spec.generation == generation
        present = self.current is not None and generation >= self.generation
        if (entering or present) and self._suspicion is None:
            self._suspicion = _Deadline(now_s + self.config.notice_s, cause, generation)

    def _entered(self, record: WorkerRecord, generation: int, now_s: float) -> None:
        """Handle a joiner that has entered a generation; if the others have continued without it, give it up."""
        record.has_state = True
        flight = self.in_flight
        expected = flight is not None and (flight.spec.generation == generation or record in self.entering())
        if not expected and len(self.holders()) > 1 and self._hope is None:
            planned = self.is_planned(record.worker)
            self._give_up(record, f"it holds the state of generation {generation}, which was called off")
            if planned:
                self._withdraw(f"joiner {record.worker} was abandoned", now_s)

    def _prepare_failed(self, told: PrepareFailed, now_s: float) -> None:
        """Handle a worker's failure to form the group of the generation in flight."""
        generation, cause, flight = told.generation, told.cause, self.in_flight
        if flight is None or flight.spec.generation != generation or self._hope is not None:
            return
        if flight.begun:
            flight.failed.add(told.worker)
            if self._suspicion is None and not self.silent(flight):
                self._suspicion = _Deadline(now_s + self.config.notice_s, cause, generation)
            return
        self._try_again(f"generation {generation} could not be formed: {cause}", now_s)

    def _try_again(self, cause: str, now_s: float) -> None:
        """Cancel a planned change that no worker entered, without a known culprit."""
        joiners = self.planned()
        self._withdraw(cause, now_s)
        # The worker to blame may be dead already: wait for the news before the others are tried again, once.
        self._retry_s = now_s + self.config.notice_s
        for record in joiners:
            record.failures += 1
            if record.failures > 1:
                self._give_up(record, "its group could not be formed")

    def _switched(self, told: Switched, now_s: float) -> None:
        """Handle a worker's switch: the first puts the generation into effect, the last completes it."""
        generation, flight, record = told.generation, self.in_flight, self.workers.get(told.worker)
        if record is not None and record.phase is WorkerPhase.READY:
            self._entered(record, generation, now_s)
        if flight is None or flight.spec.generation != generation:
            return
        if flight.effective_s is None:
            self._take_effect(flight, now_s)
        if record is not None:
            if record.phase is WorkerPhase.READY:
                record.join(now_s, others=flight.from_state and not record.loaded)
            flight.entered(told)
        if self._hope is not None:
            self._force(self._hope.cause, now_s)
        elif not self.silent(flight) and not flight.failed & self.workers.keys():
            self._complete_switch(flight, now_s)

    def _take_effect(self, flight: InFlight, now_s: float) -> None:
        """Put the generation in flight into effect after its first entry; members that it excludes are leaving."""
        before, self.current = self.generation, flight.spec
        flight.effective_s = now_s
        self.trained = True
        if self._suspicion is not None and self._suspicion.generation < flight.spec.generation:
            self._suspicion = None  # a failure in the generation before is cured by this one
        for member in self.in_phase(WorkerPhase.MEMBER):
            if flight.spec.rank_of(member.worker) is not None:
                continue
            member.enter(WorkerPhase.LEAVING, now_s)
            if member.failed_in >= before:
                self._lost(member.worker, "its last step failed", now_s)  # it waits for a generation in vain

    def _complete_switch(self, flight: InFlight, now_s: float) -> None:
        """Complete the switch, because all members have entered the generation in flight."""
        self.in_flight = None
        if flight.from_workers and not flight.forced:
            self.change_s = max(self.change_s, now_s - flight.since_s)
        self._note(flight)

    def _note_superseded(self) -> None:
        """Add the event for a generation that not all members have entered: later proofs follow that of the others."""
        if self.in_flight is not None and self.in_flight.proof:
            self._note(self.in_flight)

    def _note(self, flight: InFlight) -> None:
        """Add the event for a generation that has taken effect."""
        started = flight.from_workers == 0
        kind = EventKind.STARTED if started else EventKind.FAILURE if flight.forced else EventKind.RESIZE
        self._out.append(
            Note(
                kind=kind,
                from_workers=flight.from_workers,
                to_workers=flight.spec.world_size,
                reason=flight.spec.reason,
                pause=flight.pause,
                generation=flight.spec.generation,
                detail=flight.proof,
            )
        )

    def _flight_deadline(self, flight: InFlight, now_s: float) -> None:
        """Give up a generation that was not entered in time, or its silent members if it was partly entered."""
        # A planned change waits for the step at which all ranks agree; the first one has none to wait for.
        begun_s = flight.since_s if flight.forced or not flight.from_workers else flight.effective_s
        if begun_s is None or now_s - begun_s <= self.config.switch_timeout_s:
            return
        if not flight.begun:
            self._try_again(f"generation {flight.spec.generation} was not entered in time", now_s)
            return
        silent = self.silent(flight)
        cause = f"it did not enter generation {flight.spec.generation} in time"
        for record in silent:
            del self.workers[record.worker]
            self._out.append(Release(worker=record.worker, kill=True, reason=cause))
        names = ", ".join(w.worker for w in silent)
        self._force(
            f"lost {names}: {cause}" if silent else f"generation {flight.spec.generation} could not be formed", now_s
        )

    def _give_up(self, record: WorkerRecord, reason: str) -> None:
        del self.workers[record.worker]
        self._out.append(Release(worker=record.worker, kill=True, reason=reason))
        self._emit(EventKind.CANCELLED, self.world_size + 1, f"worker {record.worker} was given up: {reason}")
        self._check_state(record, reason)

    def _emit(self, kind: EventKind, to_workers: int, reason: str, *, generation: int = 0) -> None:
        """Emit a job event, for the generation in effect unless `generation` is given."""
        self._out.append(
            Note(
                kind=kind,
                from_workers=self.world_size,
                to_workers=to_workers,
                reason=reason,
                generation=generation or (self.current.generation if self.current is not None else 0),
            )
        )
