"""State machine of a job's membership: events in, instructions out; without clock, Ray or torch (pure).

Only this machine issues generations, and each generation supersedes all earlier ones (docs/protocol.md, pitfall 9).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastic_ray.membership.generation_changes import GenerationChanges, MembershipConfig
from elastic_ray.membership.instructions import AllLost, Complete, Instruction, Launch, Release, Reserve, Withdraw
from elastic_ray.membership.messages import Returned
from elastic_ray.membership.recovery import SurvivingWorker, recover
from elastic_ray.membership.roster import Roster, WorkerPhase, WorkerRecord, number
from elastic_ray.membership.signals import (
    Allocated,
    Finished,
    Left,
    Lost,
    PrepareFailed,
    Ready,
    Replace,
    Rerun,
    Reserved,
    StepFailed,
    Stimulus,
    Switched,
    TimePassed,
)
from placement.cluster.sizes import ANY_SIZE, AllowedSizes

_MOST_PATIENCE = 8.0  # times join_timeout_s
_UNKNOWN = 4  # generations that a controller may have announced in its last moments


class JobMembership(GenerationChanges):
    """State machine of a job's membership; its attributes are documented in its base classes."""

    def __init__(self, config: MembershipConfig, *, first_most: int = 0, named: int = 0) -> None:
        """Start without workers.

        Args:
            first_most: Largest number of workers that the first generation can have at its loader's position; 0 for
                no limit.
        """
        super().__init__(config, named=named)
        self._first_most = first_most
        self._target: dict[str, int] = {}
        self._draining: Mapping[str, float] = {}
        self._may_regrow = False
        self._reason = self._replace_reason = ""
        self._loaded = 0  # steps of the furthest automatic checkpoint that was loaded for this start
        self._patience = 1.0  # times join_timeout_s: on a busy machine, starting anew is what keeps it busy
        self._first_wish_s: float | None = None

    def handle(self, stimulus: Stimulus, now_s: float) -> list[Instruction]:
        """Handle an event and return the resulting instructions, in order; once the job ends, none until a reset."""
        self._out = []
        if self._ended:
            return self._out
        match stimulus:
            case Allocated():
                self._aim(stimulus)
            case Replace():
                self._replace(stimulus, now_s)
            case Reserved(worker=worker):
                self._reserved(worker, now_s)
            case Ready():
                self._ready(stimulus, now_s)
            case Lost(worker=worker, cause=cause, newcomer=newcomer):
                self._lost(worker, cause, now_s, newcomer=newcomer)
            case Left(worker=worker):
                self._left(worker, now_s)
            case Finished(worker=worker, rank=rank, steps=steps):
                self._finished(worker, Returned(rank=rank, steps=steps))
            case Rerun(worker=worker, has_state=has_state):
                self._rerun(worker, has_state, now_s)
            case StepFailed():
                self._step_failed(stimulus, now_s)
            case PrepareFailed():
                self._prepare_failed(stimulus, now_s)
            case Switched():
                self._switched(stimulus, now_s)
            case TimePassed():
                pass
        if not self._ended:
            self._deadlines(now_s)
        if not self._ended:
            self._reconcile(now_s)
        return self._out

    def recover(
        self,
        survivors: Sequence[SurvivingWorker],
        target: Allocated,
        *,
        issued: int,
        world_size: int,
        announced: Collection[str],
        trained: bool,
        now_s: float,
        named: int = 0,
    ) -> list[Instruction]:
        """Continue with the surviving workers after the controller's process was restarted.

        Args:
            issued: Latest generation that was saved; workers may know later ones.
            announced: Members of the latest generation announced since the last start, as saved. If no such member
                survives, all workers count as lost, because these members may have trained.
            trained: True if a generation had taken effect. If no survivor holds the state in that case, all workers
                count as lost.
            named: Number of the latest worker that may have been requested; survivors may have higher numbers.
        """
        self._aim(target)
        found = recover(survivors, world_size=world_size, now_s=now_s)
        self.workers, self.current, self.in_flight = found.workers, found.current, found.in_flight
        # A generation may have been announced and neither noted down nor entered: its number is not used again.
        self.issued = max(issued, found.issued) + _UNKNOWN
        self.named = max([self.named, named, *map(number, self.workers)])
        self.trained = trained or found.current is not None or found.in_flight is not None
        self.announced = tuple(announced)
        self._loaded = max((record.loaded for record in self.workers.values()), default=0)
        trains = self.trained or (announced and not any(w.worker in announced for w in survivors))
        if trains and not any(
            record.has_state for record in self.workers.values() if record.phase is not WorkerPhase.LEAVING
        ):
            self.current = self.in_flight = None
            self._out = []
            self._end(AllLost(reason="all workers were lost while the controller was away"))
            return self._out
        out = self._unentered(tuple(w.worker for w in survivors))
        for stimulus in found.since:
            out += self.handle(stimulus, now_s)
        if found.gone:
            self._out, self._bereft = [], True
            self._force(f"lost {', '.join(found.gone)} while the controller was away", now_s)
            out += self._out
        return out + self.handle(TimePassed(), now_s)

    def _unentered(self, living: tuple[str, ...]) -> list[Instruction]:
        """Cancel the generations that may have been announced but that no survivor has entered."""
        kept = self.in_flight.spec.generation if self.in_flight is not None else 0
        unentered = range(max(self.generation, self.issued - 2 * _UNKNOWN) + 1, self.issued + 1)
        return [Withdraw(generation=each, to=living) for each in unentered if each != kept]

    @property
    def target_workers(self) -> int:
        """Number of workers, over all nodes, that the allocator has decided on for the job."""
        return sum(self._target.values())

    def is_newcomer(self, worker: str) -> bool:
        """True if the worker has joined, or will join, a group that is training, and its loss would lose no state."""
        record = self.workers.get(worker)
        if record is None or self.current is None:
            return False
        if record.phase is WorkerPhase.MEMBER:
            return record.joined_others and len(self.members()) > 1
        return record.phase in (WorkerPhase.STARTING, WorkerPhase.READY) and not record.has_state

    def _aim(self, goal: Allocated) -> None:
        target = {node: count for node, count in goal.nodes.items() if count > 0}
        if target != self._target:
            self._bereft = False
            self._may_regrow = goal.nodes_may_come and sum(target.values()) < self.world_size
        self._target, self._reason, self._draining = target, goal.reason, goal.draining

    def _replace(self, wish: Replace, now_s: float) -> None:
        """Mark members that must leave once others are ready, unless none have been available recently."""
        for record in self.workers.values():
            wanted = record.worker in wish.workers and now_s >= self._replace_after_s
            record.replaced = wanted and record.phase is WorkerPhase.MEMBER
        self._replace_reason = wish.reason

    def _keep_replaced(self, now_s: float) -> None:
        """Keep the members marked for replacement, because no others are available."""
        for record in self.workers.values():
            if record.replaced:
                record.replaced = False
                self._replace_after_s = now_s + self.config.replace_again_s

    def _reserved(self, worker: str, now_s: float) -> None:
        record = self.workers.get(worker)
        if record is None or record.phase is not WorkerPhase.RESERVING:
            return
        record.enter(WorkerPhase.STARTING, now_s)
        self._out.append(Launch(worker=worker, node=record.node))

    def _ready(self, told: Ready, now_s: float) -> None:
        """Handle a worker that is ready and is waiting for a generation."""
        record = self.workers.get(told.worker)
        if record is None:
            return
        if record.phase is WorkerPhase.STARTING:
            record.built(now_s, loaded=told.loaded, has_state=told.has_state)
            self._patience = 1.0
            self._loaded = max(self._loaded, told.loaded)
        elif record.phase is WorkerPhase.MEMBER:
            record.rebuilt = True  # it starts over, and its Rerun was overtaken

    def _left(self, worker: str, now_s: float) -> None:
        """Handle a worker whose train function has ended after the worker left its generation."""
        record = self.workers.pop(worker, None)
        if record is None:
            return
        self._out.append(Release(worker=worker, kill=False, reason="it left its generation"))
        flight = self.in_flight
        # It may be the first to speak of the planned generation that it is no part of.
        expected = flight is not None and not flight.forced and flight.spec.rank_of(worker) is None
        if record.phase is not WorkerPhase.LEAVING and not expected:
            self._bereave(record, "it left", now_s)

    def _finished(self, worker: str, returned: Returned) -> None:
        record = self.workers.get(worker)
        if record is None:
            return
        record.phase = WorkerPhase.FINISHED
        self.returned[worker] = returned
        if not self.in_phase(WorkerPhase.MEMBER) and not self.entering():
            self._end(Complete())

    def _rerun(self, worker: str, has_state: bool, now_s: float) -> None:
        """Handle a worker that is rebuilding its model in its process and belongs to no generation."""
        record = self.workers.get(worker)
        if record is None or record.phase not in (WorkerPhase.MEMBER, WorkerPhase.READY, WorkerPhase.STARTING):
            return
        before = record.phase
        record.start_over(now_s, state_generation=self.generation if has_state else 0, has_state=has_state)
        # Were it to hear only now of a generation that was announced to it before, it might enter it alone.
        for generation in range(max(1, self.generation), self.issued + 1):
            self._out.append(Withdraw(generation=generation, to=(worker,)))
        cause = f"worker {worker} ran out of memory and starts over"
        if before is WorkerPhase.MEMBER:
            self._force(cause, now_s)
        elif self.is_planned(worker):
            self._withdraw(cause, now_s)

    def _deadlines(self, now_s: float) -> None:
        """Act on deadlines that have passed."""
        config = self.config
        if self._hope is not None and now_s >= self._hope.at_s:
            if not self.holders():
                self._end(self._all_lost(self._hope.cause))
                return
            self._idle()
        if self._suspicion is not None and now_s >= self._suspicion.at_s:
            self._force(f"a collective failed: {self._suspicion.cause}", now_s)
        for record in self.in_phase(WorkerPhase.RESERVING):
            if now_s - record.since_s > config.reserve_timeout_s:
                self._not_before_s = max(self._not_before_s, now_s + config.backoff_s)
                self._keep_replaced(now_s)
                self._give_up(record, f"node {record.node[:8]} did not free its resources in time")
        for record in self.in_phase(WorkerPhase.LEAVING):
            if now_s - record.since_s > config.switch_timeout_s:
                self._lost(record.worker, "its train function did not unwind in time", now_s)
        limit_s = config.join_timeout_s * self._patience
        late = [record for record in self.in_phase(WorkerPhase.STARTING) if now_s - record.since_s > limit_s]
        for record in late:
            self._not_before_s = max(self._not_before_s, now_s + config.backoff_s)
            self._keep_replaced(now_s)
            times = f" x {self._patience:g}" if self._patience > 1 else ""
            self._give_up(record, f"it was not ready within join_timeout_s={config.join_timeout_s:.0f}{times}")
        if late:
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        if self.in_flight is not None and self._hope is None and not self._ended:
            self._flight_deadline(self.in_flight, now_s)

    def _reconcile(self, now_s: float) -> None:
        """Request workers, release surplus workers and announce a generation, to approach the target."""
        if self.returned:
            return  # the job is ending
        leavers, unwanted = surplus(self, self._target)
        for record in unwanted:
            del self.workers[record.worker]
            self._out.append(Release(worker=record.worker, kill=True, reason="it is not wanted any more"))
        self._ask_for_missing(now_s)
        if self.in_flight is None and self._suspicion is None and now_s >= self._retry_s:
            self._change(leavers, now_s)

    def _ask_for_missing(self, now_s: float) -> None:
        """Reserve resources for the workers that the target requires and the roster lacks."""
        if now_s < self._not_before_s:
            return
        present = self.present()
        for node, wanted in sorted(self._target.items()):
            for _ in range(wanted - present.get(node, 0)):
                self.named += 1
                worker = f"w{self.named}"
                self.workers[worker] = WorkerRecord(
                    worker=worker, node=node, phase=WorkerPhase.RESERVING, since_s=now_s
                )
                self._out.append(Reserve(worker=worker, node=node))

    def _change(self, leavers: list[WorkerRecord], now_s: float) -> None:
        """Announce the next planned generation if it is worthwhile now."""
        joiners = self.in_phase(WorkerPhase.READY)
        if not joiners and not leavers:
            self._first_wish_s = None
            return
        if self._first_wish_s is None:
            self._first_wish_s = now_s
        # Who leaves while others come saves the job a pause, and a time at a smaller size, by waiting for them.
        coming = (
            self.in_phase(WorkerPhase.STARTING, WorkerPhase.RESERVING)
            if leavers
            else self.in_phase(WorkerPhase.STARTING)
        )
        leave_s = [self._draining[record.node] for record in leavers if record.node in self._draining]
        hurry = any(now_s >= each for each in leave_s)
        # Nobody else waits for the slots of nodes that go.
        trains_on = bool(leave_s) and all(record.node in self._draining or record.replaced for record in leavers)
        if trains_on and self._may_regrow and not hurry:  # as many leave as join, until nodes for the others come
            leavers = leavers[: len(joiners)]
            if not leavers:
                return
        may_wait = trains_on or now_s - self._first_wish_s < self.config.patience_s
        patient = bool(coming) and may_wait and not hurry
        reason = self._reason
        if self.current is None:
            wanted = min(self.config.min_workers, max(1, self.target_workers))
            group = first_group(self, wanted=wanted, most=self._first_most, patient=patient, sizes=self.config.sizes)
            if group is not None and not self.holders() and group[0].loaded < self._loaded:
                self._loaded = 0  # they would begin anew; others in their place may load what is there
                for record in group:
                    self._give_up(record, "it could not load the automatic checkpoint that another had loaded")
                return
        else:
            least, sizes = self.config.min_workers, self.config.sizes
            group = next_group(self, leavers, min_workers=least, sizes=sizes, patient=may_wait, hurry=hurry)
            if group == self.members():
                self._first_wish_s = None
                return
            group = None if patient else group
            reason = f"in place of lost workers; {reason}" if self._bereft and joiners else reason
            reason = self._replace_reason if any(w.replaced for w in leavers) else reason
        if group is not None:
            self._first_wish_s, self._bereft = None, False
            self._issue(group, forced=False, reason=reason, now_s=now_s)

    def reset(self, *, first_most: int = 0) -> list[Instruction]:
        """Release every worker before a restart from a checkpoint; the target number of workers is kept.

        ``first_most`` limits the first generation after the restart, as in ``__init__``.
        """
        self._first_most, self._loaded = first_most, 0
        self.announced, self.trained = (), False
        released = [Release(worker=w, kill=True, reason="the job restarts") for w in self.workers]
        self.workers.clear()
        self.returned.clear()
        self._idle()
        self._suspicion = self._first_wish_s = None
        self._not_before_s = self._retry_s = 0.0
        self._ended = False
        return list(released)


def surplus(roster: Roster, target: Mapping[str, int]) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
    """Return the members that must leave, and the other workers to release at once, to reach the target.

    Members marked for replacement leave once the same number of new workers are ready, or if the target has no room for
    them.
    """
    leavers: list[WorkerRecord] = []
    unwanted: list[WorkerRecord] = []
    rank = {w.worker: index for index, w in enumerate(roster.members())}
    flying = {m.worker for m in roster.in_flight.spec.members} if roster.in_flight is not None else set()
    for node, count in roster.present().items():
        excess = count - target.get(node, 0)
        if excess <= 0:
            continue
        here = [w for w in roster.workers.values() if w.node == node and w.stays]
        # Newest first, and members last: what has not joined costs nothing to give back.
        here.sort(key=lambda w: (w.phase is not WorkerPhase.MEMBER, rank.get(w.worker, 0), w.number), reverse=True)
        for record in here[:excess]:
            if record.phase is WorkerPhase.MEMBER:
                leavers.append(record)
            elif record.worker not in flying and not record.has_state:
                unwanted.append(record)
    ready = len(roster.in_phase(WorkerPhase.READY)) - sum(1 for w in unwanted if w.phase is WorkerPhase.READY)
    replaced = [w for w in roster.members() if w.replaced]
    places = sum(target.values()) - sum(1 for w in roster.members() if w.stays) + len(leavers)
    leavers += replaced[: max(0, ready, len(replaced) - max(0, places))]
    return leavers, unwanted


def next_group(
    roster: Roster,
    leavers: Sequence[WorkerRecord],
    *,
    min_workers: int,
    sizes: AllowedSizes = ANY_SIZE,
    patient: bool = True,
    hurry: bool = False,
) -> list[WorkerRecord] | None:
    """Return the members of the next planned generation, in rank order; None if it should wait.

    While more workers are starting, the generation waits if it would have fewer than ``min_workers``; for a while, it
    also waits if its size would not be allowed. If no more workers are starting, joiners beyond an allowed size wait;
    remaining members always continue. Leavers hand their state over to members that stay. They are therefore kept if
    too few others stay for the job's memory need, and leave as joiners arrive. A group that is too small for its memory
    need accepts joiners until it is large enough, even if its size is not allowed.

    Args:
        patient: True to wait for an allowed size; False if the requested resources may never become free.
        hurry: True to form the group at once, because a leaver's node is about to shut down.
    """
    members = roster.members()
    leaving = {w.worker for w in leavers}
    ready = roster.in_phase(WorkerPhase.READY)
    stay = len(members) - len(leaving)
    fewest = min(sizes.fitting, len(members))
    if ready:  # one of them must find a place, or the leavers would never go
        room = sizes.at_most(max(len(members), stay + len(ready))) or len(members)
        fewest = max(1, min(fewest, room - 1))  # one must bring the state along
    kept = [w.worker for w in members if w.worker in leaving][: max(0, fewest - stay)]
    stayers = [w for w in members if w.worker not in leaving or w.worker in kept]
    group = stayers + ready
    unfit = len(group) < min(min_workers, len(members)) or (patient and not sizes.allow(len(group)))
    if unfit and not hurry and roster.in_phase(WorkerPhase.STARTING, WorkerPhase.RESERVING):
        return None
    return group[: max(sizes.at_most(len(group)), sizes.fitting, len(stayers))]


def first_group(
    roster: Roster, *, wanted: int, most: int, patient: bool, sizes: AllowedSizes = ANY_SIZE
) -> list[WorkerRecord] | None:
    """Return the first generation's members, initially or after all members have been lost; None to wait.

    After a loss, the group consists only of workers that hold the state; others join later, at a suitable step. A
    worker that has loaded an automatic checkpoint does not count as a holder, because all starting workers can load
    it and start together.

    Args:
        most: Largest number of workers that can start; 0 for no limit.
        patient: True to wait for workers that are starting.
        sizes: Allowed numbers of workers; workers that hold a state always start.
    """
    holders = roster.holders()
    group = [w for w in roster.in_phase(WorkerPhase.READY) if w.has_state or not holders]
    if holders:
        newest = max(w.state_generation for w in holders)
        if all(w.state_generation < newest for w in group):
            return None  # who has trained longest is still starting over
        patient = patient and any(w.phase is WorkerPhase.STARTING for w in holders)
    else:
        group = sorted(group, key=lambda w: -w.loaded)[: most or None]
        patient = patient and len(group) != most
        if len(group) < min(wanted, most or wanted):
            return None
        group = group[: sizes.at_most(len(group)) or None]
    return group if group and not patient else None
