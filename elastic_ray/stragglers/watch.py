"""Watch for stragglers in a group, which gives the same result on all ranks since all know all measures (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ray.stragglers.detection import (
    MIN_STEPS,
    RECOVERED,
    SendTrace,
    SlowWorker,
    SpeedTrace,
    StragglerCause,
    StragglerConfig,
    Trace,
    lower_median,
    moved,
    plus,
)

if TYPE_CHECKING:
    from elastic_ray.membership.messages import Member
    from elastic_ray.monitoring.measures import WorkerMeasures

REPLACED_BELOW = 0.67
"""Speed over the median's of a worker that is replaced if it stays so slow."""
_LEAST_WEIGHT = 1.0 / 64.0
_FULL_WEIGHT = 0.9  # and above, for which no unequal shares are worth it
_WORTH = 1.1  # times a weight must move
# Shorter steps are taken together: no verdict is to rest on what else a core has to do for a moment. Ten make 2.5 s.
_SHORT_S = 0.25
_LONGEST_REST = 32 * MIN_STEPS
FULL = 0.95
"""Part of a memory that is taken from which the kernel, or the GPU's allocator, is busy with making room."""
_FAULT_S = 1e-4  # the least that a page from a fast disk takes
_EXPLAINS = 0.25  # part of what a rank takes longer
_ALPHA = 0.1


class StragglerWatch:
    """Watch that finds stragglers, gives them fewer samples, and marks those to be replaced.

    Every committed training step must be reported on all ranks; durations come from the steps' own times, not from a
    clock. If stragglers get fewer samples, shares depend on the measured times: a rank that takes r times as long as
    the others then gets 1 / r of its current samples. If part of a step does not shrink with its samples, this
    converges from above, with an error that shrinks each time by the factor (that part) / (whole step). A rank that
    catches up regains its samples in the same way.

    Args:
        config: Response to stragglers, unless :meth:`ask` requests more.
        equal: Function that returns True if the current group must have equal shares, because unequal shares did not
            fit into memory. From then on, all later groups have equal shares too.
    """

    def __init__(
        self,
        config: StragglerConfig,
        *,
        members: Callable[[], Sequence[Member]],
        equal: Callable[[], bool] = bool,
        measured: Callable[[], Sequence[WorkerMeasures]],
        tell: Callable[[str, Mapping[str, Any]], None],
        measure: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = StragglerConfig()
        self._measure, self._members, self._equal = measure, members, equal
        self._withdrawn = False
        self._measured, self._tell = measured, tell
        self._workers: tuple[str, ...] = ()
        self._seen: Sequence[Member] = ()
        self._recent = RecentSteps()
        self._trace, self._memory, self._sends = SpeedTrace(), MemoryTrace(), SendTrace()
        self._rest = MIN_STEPS
        self._rising: bool | None = None
        self.slow: tuple[SlowWorker, ...] = ()  # the present stragglers, by rank
        # workers that are not slow but send slowly, by rank; nothing but telling is done about them
        self.senders: tuple[SlowWorker, ...] = ()
        self.changes = 0  # how often the shares have changed
        self.ask(config)

    def ask(self, config: StragglerConfig) -> None:
        """Request at least the response in ``config``; call this before the first epoch, on all ranks."""
        if config.goes_beyond(self._config):
            self._config = config
            self._measure()

    def lacks(self, config: StragglerConfig) -> bool:
        """True if ``config`` requests a stronger response than the current one."""
        return config.goes_beyond(self._config)

    @property
    def shares(self) -> bool:
        """True if slow ranks get fewer samples."""
        return self._config.shares

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Each rank's weight in dividing a step's samples; None if all ranks have equal shares."""
        if not self.slow or self._equal() or not any(each.weight < 1.0 for each in self.slow):
            return None
        weights = {each.worker: each.weight for each in self.slow}
        return tuple(weights.get(member.worker, 1.0) for member in self._members())

    @property
    def ratios(self) -> tuple[float, ...]:
        """Each rank's time for equal work, divided by the group's median; empty until enough steps are measured."""
        if not self._trace.ready or self._workers != tuple(member.worker for member in self._members()):
            return ()
        return tuple(self._trace.ratio(rank, self._healthy) for rank, _ in enumerate(self._workers))

    @property
    def uneven(self) -> bool:
        """True if ranks have unequal shares, so that step times are not representative of equal shares."""
        return self.weights is not None

    def after_step(self, sizes: Sequence[Sequence[float]]) -> None:
        """Record the measures of a committed training step."""
        if not self._config.watches:
            return
        members, measured = self._members(), self._measured()
        if len(members) < 2 or not len(members) == len(measured) == len(sizes):
            return
        if members is not self._seen:
            self._seen = members
            self._enter(tuple(member.worker for member in members))
        if self._equal():
            self._withdraw()
        self._recent = self._recent.plus(sizes, measured)
        if self._recent.seconds < _SHORT_S:
            return
        recent, self._recent = self._recent, RecentSteps()
        self._trace = self._trace.add(work=recent.work, busy_s=recent.busy_s, data_s=recent.data_s, among=self._healthy)
        compute_s = [busy - wait for busy, wait in zip(recent.busy_s, recent.data_s, strict=True)]
        used = [each.memory_used for each in measured]
        self._memory = self._memory.add(faults=recent.faults, compute_s=compute_s, used=used)
        self._sends = self._sends.add(sending_s=recent.sending_s, mib=recent.mib, seconds=recent.seconds)
        self.slow = tuple(dataclasses.replace(each, slow_s=each.slow_s + recent.seconds) for each in self.slow)
        if self._trace.ready:
            self._judge(members)
            self._share()
        self._judge_senders(members)
        self._ask_for_replacement()

    def _enter(self, workers: tuple[str, ...]) -> None:
        """Enter a group that may have changed, keeping what is known about the workers that remain."""
        if workers == self._workers:
            return
        self.slow = tuple(each for each in self.slow if each.worker in workers)
        self.senders = ()
        self._workers, self._trace, self._recent = workers, SpeedTrace(), RecentSteps()
        self._memory, self._sends = MemoryTrace(), SendTrace()
        self._rest, self._rising = MIN_STEPS, None

    def _withdraw(self) -> None:
        """Give all ranks equal shares for good; stragglers remain known."""
        if self._withdrawn:
            return
        self._withdrawn = True
        if any(each.weight < 1.0 for each in self.slow):
            self.slow = tuple(dataclasses.replace(each, weight=1.0, fixed=None) for each in self.slow)
            self._reshared()

    def _judge(self, members: Sequence[Member]) -> None:
        """Find new stragglers, and remove those that have caught up."""
        known = {each.worker: each for each in self.slow}
        healthy = self._healthy
        if not known and not any(self._trace.slow(rank, healthy) for rank in healthy):
            return
        for rank, member in enumerate(members):
            before = known.get(member.worker)
            if before is None:
                if self._trace.slow(rank, healthy):
                    found = self._found(rank, members)
                    known[member.worker] = found
                    self._tell(str(found), self._detail("slow", found, rank))
                continue
            times = self._trace.ratio(rank, healthy)
            now = _measured_again(before, times)
            known[member.worker] = now
            if RECOVERED * times < before.weight or (times < RECOVERED and RECOVERED * now.ratio < 1.0):
                del known[member.worker]
                text = f"worker {member.worker} keeps up with the others again"
                self._tell(text, self._detail("recovered", now, rank))
        before_all, self.slow = self.slow, tuple(known[worker] for worker in self._workers if worker in known)
        if any(each.weight < 1.0 and each.worker not in known for each in before_all):
            self._reshared()

    @property
    def _healthy(self) -> tuple[int, ...]:
        """Ranks not known to be slow, or all ranks if all are slow."""
        ranks = tuple(range(len(self._workers)))
        if not self.slow:
            return ranks
        slow = {each.worker for each in self.slow}
        return tuple(rank for rank in ranks if self._workers[rank] not in slow) or ranks

    def _found(self, rank: int, members: Sequence[Member]) -> SlowWorker:
        """Return the record of a new straggler, with its probable cause."""
        member, healthy, trace = members[rank], self._healthy, self._trace
        here = [other for other, each in enumerate(members) if each.node == member.node]
        cause = StragglerCause.WORKER
        if trace.waits_for_data(rank, healthy):
            cause = StragglerCause.DATA
        elif self._memory.short(rank, healthy):
            cause = StragglerCause.MEMORY
        elif 1 < len(here) < len(members) and all(RECOVERED * trace.ratio(other, healthy) > 1.0 for other in here):
            cause = StragglerCause.NODE
        ratio = trace.last_ratio(rank, healthy)
        return SlowWorker(worker=member.worker, node=member.node, ratio=ratio, cause=cause)

    def _judge_senders(self, members: Sequence[Member]) -> None:
        """Find workers that send slowly but compute at normal speed, and remove those that no longer do."""
        known, slow = {each.worker: each for each in self.senders}, {each.worker for each in self.slow}
        found: dict[str, SlowWorker] = {}
        for rank in self._sends.slow:
            member = members[rank]
            if member.worker not in slow:
                found[member.worker] = known.get(member.worker) or SlowWorker(
                    worker=member.worker, node=member.node, ratio=self._sends.ratios[rank], cause=StragglerCause.NETWORK
                )
        self.senders = tuple(found.values())
        for worker in sorted(found.keys() ^ known.keys()):
            each, is_slow = found.get(worker) or known[worker], worker in found
            text = str(each) if is_slow else f"worker {worker} sends as fast as the others again"
            detail = self._detail("slow" if is_slow else "recovered", each, self._workers.index(worker))
            self._tell(text, detail)

    @staticmethod
    def _detail(state: str, slow: SlowWorker, rank: int) -> dict[str, Any]:
        """Return the details of an event as plain values."""
        return {
            "state": state,
            "worker": slow.worker,
            "rank": rank,
            "node": slow.node,
            "ratio": round(slow.ratio, 3),
            "cause": slow.cause.value,
            "weight": round(slow.weight, 4),
        }

    def _share(self) -> None:
        """Move the shares of slow ranks towards equal times, if the change is large enough."""
        if not self._config.shares or self._withdrawn or not self.slow:
            return
        wanted, healthy = [], self._healthy
        if not self._trace.ready or len(healthy) == len(self._workers):
            return
        for each in self.slow:
            rank = self._workers.index(each.worker)
            times = each.ratio if each.weight == 1.0 else self._trace.ratio(rank, healthy)
            weight = max(_LEAST_WEIGHT, min(1.0, each.weight / times))
            weight = 1.0 if weight > _FULL_WEIGHT else weight
            moves = weight > _WORTH * each.weight or each.weight > _WORTH * weight or weight == 1.0 > each.weight
            wanted.append(dataclasses.replace(each, weight=weight) if moves else each)
        new = any(before.weight == 1.0 > after.weight for before, after in zip(self.slow, wanted, strict=True))
        if tuple(wanted) == self.slow or not (new or self._trace.steps >= self._rest):
            return
        rises = any(after.weight > before.weight for before, after in zip(self.slow, wanted, strict=True))
        if self._rising is not None and rises != self._rising:
            self._rest = min(2 * self._rest, _LONGEST_REST)  # one that is slow now and then is not followed closely
        self._rising = rises
        for before, after in zip(self.slow, wanted, strict=True):
            if before.weight == 1.0 > after.weight:
                text = f"worker {after.worker} takes {after.weight:.2f} of another's samples in a step from now on"
                self._tell(text, self._detail("shares", after, self._workers.index(after.worker)))
        self.slow = tuple(wanted)
        self._reshared()

    def _reshared(self) -> None:
        """Restart the measurements, because new shares apply from the next step on."""
        self.changes += 1
        self._trace, self._recent = SpeedTrace(), RecentSteps()

    def _ask_for_replacement(self) -> None:
        """Mark workers that have been too slow for too long to be replaced."""
        config = self._config
        if config.replaces and self.slow:
            self.slow = tuple(
                dataclasses.replace(
                    each, replace=each.slow_s >= config.patience_s and REPLACED_BELOW * each.ratio > 1.0
                )
                for each in self.slow
            )

    def capture(self) -> dict[str, Any]:
        """Return the state to send to joining workers and to save in checkpoints."""
        return {
            "workers": list(self._workers),
            "trace": self._trace.to_state(),
            "memory": self._memory.to_state(),
            "sends": self._sends.to_state(),
            "recent": self._recent.to_state(),
            "rest": self._rest,
            "rising": self._rising,
            "withdrawn": self._withdrawn,
            "slow": [_to_state(each) for each in self.slow],
            "senders": [_to_state(each) for each in self.senders],
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`capture`."""
        self._workers, self._trace = tuple(tree["workers"]), SpeedTrace.from_state(tree["trace"])
        self._memory, self._sends = MemoryTrace.from_state(tree["memory"]), SendTrace.from_state(tree["sends"])
        self._recent = RecentSteps.from_state(tree["recent"])
        self._rest, self._rising, self._withdrawn = tree["rest"], tree["rising"], tree["withdrawn"]
        self.slow = tuple(_from_state(each) for each in tree["slow"])
        self.senders = tuple(_from_state(each) for each in tree["senders"])
        self.changes += 1


def _to_state(slow: SlowWorker) -> dict[str, Any]:
    return {**dataclasses.asdict(slow), "cause": slow.cause.value}


def _from_state(tree: Mapping[str, Any]) -> SlowWorker:
    return SlowWorker(**{**tree, "cause": StragglerCause(tree["cause"])})


def _measured_again(slow: SlowWorker, times: float) -> SlowWorker:
    """Return the record of a straggler that takes `times` as long as the others with its current share.

    If a part c of its time does not shrink with its work, a share w takes r (c + (1 - c) w) times as long, where r is
    the ratio at equal work. The first measurement at a different share gives c, since r is already known.
    """
    fixed = slow.fixed
    if fixed is None and slow.weight < 1.0:
        fixed = max(0.0, min(1.0, (times / slow.ratio - slow.weight) / (1.0 - slow.weight)))
    part = fixed or 0.0
    return dataclasses.replace(slow, fixed=fixed, ratio=times / (part + (1.0 - part) * slow.weight))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecentSteps(Trace):
    """Sums of the ranks' measures over recent steps, until these steps have lasted long enough to be evaluated."""

    work: tuple[float, ...] = ()  # samples of each rank
    # time of each rank until its gradients were complete [s]
    busy_s: tuple[float, ...] = ()
    data_s: tuple[float, ...] = ()  # the part of it that was waiting for data [s]
    faults: tuple[float, ...] = ()  # pages that each rank fetched from a disk
    sending_s: tuple[float, ...] = ()  # time in which each rank was sending [s]
    mib: tuple[float, ...] = ()  # what each rank handed to collectives [MiB]
    seconds: float = 0.0  # of the steps, by the slowest rank's clock [s]

    def plus(self, sizes: Sequence[Sequence[float]], measured: Sequence[WorkerMeasures]) -> RecentSteps:
        """Return the sums with another step added, given ``sizes[rank][micro]`` and each rank's measures."""
        return RecentSteps(
            work=plus(self.work, [sum(row) for row in sizes]),
            busy_s=plus(self.busy_s, [each.compute_s + each.data_s for each in measured]),
            data_s=plus(self.data_s, [each.data_s for each in measured]),
            faults=plus(self.faults, [each.major_faults for each in measured]),
            sending_s=plus(self.sending_s, [each.sending_s for each in measured]),
            mib=plus(self.mib, [each.wire_mib for each in measured]),
            seconds=self.seconds + max([each.step_s for each in measured]),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace(Trace):
    """Memory measures of one group's ranks, step by step."""

    # by rank, the least time that its pages from disks have taken, moving average over steps [s]
    faults_s: tuple[float, ...] = ()
    compute_s: tuple[float, ...] = ()  # by rank, moving average of its compute time [s]
    used: tuple[float, ...] = ()  # by rank, the part of its memory that was taken last

    def add(self, *, faults: Sequence[float], compute_s: Sequence[float], used: Sequence[float]) -> MemoryTrace:
        """Return the trace after one more step, given ranks' page faults, compute times [s] and used memory [0, 1]."""
        now_s = [_FAULT_S * count for count in faults]
        return MemoryTrace(
            faults_s=moved(self.faults_s or now_s, now_s, _ALPHA),
            compute_s=moved(self.compute_s or compute_s, compute_s, _ALPHA),
            used=tuple(used),
        )

    def short(self, rank: int, among: Sequence[int]) -> bool:
        """True if the slow rank ``rank`` lacks memory, compared with the ranks ``among``.

        This is the case if its page faults explain at least a quarter of its extra time, or if its memory is full and
        the other ranks' memory is not. Conditions common to all ranks (reading a mapped file, or a GPU that is full by
        design) explain nothing.
        """
        others = [other for other in among if other != rank]
        if not self.used or not others:
            return False
        beyond_s = self.faults_s[rank] - lower_median([self.faults_s[other] for other in others])
        excess_s = self.compute_s[rank] - lower_median([self.compute_s[other] for other in others])
        if excess_s <= 0.0:
            return False
        full = self.used[rank] >= FULL > lower_median([self.used[other] for other in others])
        return full or beyond_s >= _EXPLAINS * excess_s
