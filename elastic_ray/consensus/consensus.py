"""Consensus between one rank and the others: announcements, votes, control values, and conclusions from them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import Communicator
from elastic_ray.communication.connections import NoGroup
from elastic_ray.consensus.announcer import PAYLOAD_SIZE, Announcer
from elastic_ray.consensus.intents import Announced, Intent, agreed_generations_ahead, names_agree, names_ballot

if TYPE_CHECKING:
    from elastic_ray.consensus.unit_wishes import UnitWishes
    from elastic_ray.membership.worker_side import WorkerMembership
    from elastic_ray.run.run import Group
    from elastic_ray.state.layout import DataPlan, MergeLayout
    from elastic_ray.state.replicas import Replicas
    from elastic_ray.steps.ledger import StepLedger

# What rides on every gradient reduction and vote: generations ahead, their square, stop, rank 0's wish for m and s,
# preemption, how often rank 0 has reported, its wishes that all ranks hold the same model (1) and compare it (2),
# whether a rank ran out of memory, and the critical batch that rank 0 knows.
CONTROL_SIZE = 10
# A vote continues with a digest of the names of sums, and how many they are. The sums themselves follow there as far as
# there is room, and in a reduction of their own from there on: of a length that is known to be the same by then.
_NAMES_END = CONTROL_SIZE + 4
_SUMS_ROOM = PAYLOAD_SIZE - _NAMES_END

_MOST_AHEAD = 32
_UNRECORDED = 3  # reports of another rank without one of rank 0
UNRECORDED = (
    f"a rank other than 0 has called report() {_UNRECORDED} times and rank 0 never: metrics are recorded from rank 0 "
    "alone. Call report() on every rank, or on rank 0; numbers of all ranks add up in an elastic_ray.Accumulator"
)

Sums: TypeAlias = Mapping[tuple[int, int], Mapping[str, float]]


class AgreedChanges:
    """Decisions that the current group's ranks have agreed on but not carried out yet.

    Attributes:
        generation: Generation to enter after this step; 0 for none.
        stop: True if the job ends permanently after this step.
        preempted: True if the job stops after this step and will continue later.
        batch: Batch shape to change to; None for no change.
        comparison: True if all ranks must compare their models in their next announcement.
        wants_consensus: On rank 0, True if all ranks should make their models identical after the next step, to save
            them.
        wants_comparison: On rank 0, True if all ranks should compare their models, because rank 0 has reported a
            checkpoint.
        ran_out: True if this rank (any rank, once the sums are known) ran out of memory in the current step.
        saves: True if checkpoints are reported in the current group.
        reports: Number of rank 0's ``report`` calls. It is shared because a rank with fewer calls may become rank 0.
        critical_batch: Critical batch measured by the job's branches; None if unknown, and in a group's first step.
    """

    def __init__(self, wishes: WorkerMembership | UnitWishes) -> None:
        self._wishes = wishes
        self.generation = 0
        self.stop = False
        self.preempted = False
        self.ran_out = False
        self.reports = 0
        self.batch: BatchChoice | None = None
        self.critical_batch: int | None = None
        self.wants_consensus = self._consensus = False
        self.wants_comparison = self.comparison = self.saves = False
        self._heard = self._others = 0
        self._ahead: dict[float, int] = {}  # what this rank has said of it, and what it meant

    def start(self) -> None:
        """Enter a new group and discard the previous group's agreements."""
        self.generation, self.batch, self.ran_out, self.critical_batch = 0, None, False, None
        self.wants_consensus = self._consensus = False
        self.wants_comparison = self.comparison = self.saves = False

    def compared(self) -> None:
        """Clear the request to compare models, because all ranks have compared them."""
        self.comparison = False

    def pop_consensus(self) -> bool:
        """Return True if all ranks must make their models identical now; clear this request."""
        asked, self._consensus = self._consensus, False
        return asked

    def pop_generation(self) -> int:
        """Return the number of the generation to enter, and clear it; 0 for none.

        If the caller does not enter the generation, the ranks must agree on it again.
        """
        generation, self.generation = self.generation, 0
        return generation

    def pop_batch(self) -> BatchChoice | None:
        """Return the agreed batch shape to change to, and clear it; None for no change."""
        batch, self.batch = self.batch, None
        return batch

    @property
    def reports_of_first(self) -> int:
        """Number of ``report`` calls that rank 0 had made by the last collective with control values."""
        return self._heard

    def forget_reports(self, before: int) -> None:
        """Count only the first ``before`` calls of ``report``: the later ones are made again, with their step."""
        self.reports, self._heard = min(self.reports, before), min(self._heard, before)

    def is_unrecorded(self) -> bool:
        """Count a report by a rank other than 0; return True on the third one if rank 0 has never reported."""
        self._others += 1
        return self._others == _UNRECORDED and not self._heard

    def values(self, rank: int) -> list[float]:
        """Return this rank's control values, which are summed over the ranks (``CONTROL_SIZE``; exact in float32)."""
        wishes = self._wishes
        # Squares of larger numbers are not exact in float32 over all ranks, and a job whose changes are cancelled for
        # days gets there. Ranks that have prepared a group are never so far apart.
        ahead = float((wishes.prepared_ahead - 1) % _MOST_AHEAD + 1 if wishes.prepared_ahead else 0)
        self._ahead[ahead] = wishes.prepared_ahead
        wish = wishes.wanted_batch if rank == 0 else None
        return [
            ahead,
            ahead * ahead,
            float(wishes.stop_requested),
            float(wish.atomic_bsz) if wish else 0.0,
            float(wish.accum_steps) if wish else 0.0,
            float(wishes.preempting),
            float(self.reports) if rank == 0 else 0.0,
            float(self.wants_consensus + 2 * self.wants_comparison) if rank == 0 else 0.0,
            float(self.ran_out),
            float(wishes.critical_batch) if rank == 0 else 0.0,
        ]

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Update the agreed decisions from control values summed over all ranks, in the same way on every rank."""
        if sums[0] > 0 and (ahead := agreed_generations_ahead(sums[0], sums[1], world_size)):
            self.generation = self._wishes.generation + self._ahead[ahead]
        self.stop = self.stop or sums[2] > 0
        self.preempted = self.preempted or sums[5] > 0
        self._heard = max(self._heard, round(sums[6]))
        self.reports = max(self.reports, self._heard)
        wishes = round(sums[7])
        if wishes & 1:
            self.wants_consensus, self._consensus = False, True
        if wishes & 2:
            self.wants_comparison, self.comparison, self.saves = False, True, True
        self.ran_out = self.ran_out or sums[8] > 0
        if sums[3] > 0:
            self.batch = BatchChoice(atomic_bsz=round(sums[3]), accum_steps=round(sums[4]))
        if sums[9] > 0:
            self.critical_batch = round(sums[9])

    def vote(
        self, communicator: Communicator, added: Sums, agree: Callable[[Sequence[float]], Sequence[float]]
    ) -> list[tuple[tuple[int, int], str, float]]:
        """Vote (sum the ranks' control values) in a separate collective, and sum all values added to accumulators.

        Args:
            agree: Announces the vote with a payload, and returns the payload's sums over all ranks.

        Returns the accumulator, name and sum of each value, in the same order on every rank.

        Raises the same errors as :meth:`RankConsensus.vote`.
        """
        names = [(key, name) for key in sorted(added) for name in sorted(added[key])]
        world_size = communicator.world_size
        if world_size == 1:
            self.conclude(self.values(communicator.rank), 1)
            return [(key, name, added[key][name]) for key, name in names]
        sums = [added[key][name] for key, name in names]
        with communicator.together():  # a worker of a unit may have added to more names than another one
            ballot = list(agree([*self.values(communicator.rank), *names_ballot(names), *sums[:_SUMS_ROOM]]))
            if not names_agree(ballot[CONTROL_SIZE:_NAMES_END], world_size):
                raise RuntimeError(
                    "every rank must add to the same names of the same Accumulators in a step, at least 0.0, but they "
                    f"differ; this rank has added to {sorted({name for _, name in names}) or 'none'}"
                )
            if len(sums) > _SUMS_ROOM:
                rest = torch.tensor(sums[_SUMS_ROOM:], dtype=torch.float64)
                communicator.wait(communicator.all_reduce(rest))
                sums[_SUMS_ROOM:] = rest.tolist()
        self.conclude(ballot[:CONTROL_SIZE], world_size)
        sums[:_SUMS_ROOM] = ballot[_NAMES_END : _NAMES_END + min(len(sums), _SUMS_ROOM)]
        return [(key, name, value) for (key, name), value in zip(names, sums, strict=True)]


def with_names_of_first_rank(communicator: Communicator, added: Sums) -> Sums:
    """Return this rank's sums, extended by a 0 for each name that only rank 0 has used.

    A rank without a batch cannot know these names. Raises CommunicationFailedError if the collective fails.
    """
    if communicator.world_size == 1:
        return added
    names = [[*key, name] for key in sorted(added) for name in sorted(added[key])]
    told = communicator.broadcast_bytes(json.dumps(names).encode(), 0)
    known = {key: dict(sums) for key, sums in added.items()}
    for scope, number, name in json.loads(told):
        known.setdefault((scope, number), {}).setdefault(name, 0.0)
    return known


logger = logging.getLogger(__name__)

RAN_OUT = "a worker ran out of memory"
"""Why a step is lost that all ranks draw again with fewer samples at once; the group stays."""

_READS_DIFFER = (
    "an iterable dataset does not give the same samples in the same order on every worker: each reads all of it and "
    "keeps its share by position, so that samples are used twice or never. Leave out a division by rank in its "
    "__iter__ (get_rank(), split_dataset_by_node; webdataset: nodesplitter=None), and shuffle by a seed and the epoch "
    "(set_epoch), not by the clock or the process (webdataset: detshuffle in place of shuffle). If only an "
    "augmentation draws other random numbers, all is well"
)


class ControlPart(Protocol):
    """Protocol for control values that are sent with gradient reductions, and for the conclusions from their sums.

    The values are only sent with reductions that commit a training step. If only one of two ranks has received a
    conclusion, the two have therefore not committed the same steps.
    """

    @property
    def resting(self) -> Sequence[float] | None:
        """Constant values for a part that is not in use on this rank and draws no conclusions; None if in use."""

    def start(self) -> None:
        """Enter a new group and discard the previous group's conclusions."""

    def size(self, world_size: int) -> int:
        """Return the number of values, which is the same on all ranks of a group."""

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """Return this rank's :meth:`size` values; sums that must be exact have to be representable in float32."""

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Draw conclusions from :meth:`values` summed over all ranks; the sums are the same on every rank."""


class RankConsensus:
    """Consensus between one rank and the other ranks of its group.

    Args:
        is_last_epoch: Returns True if all ranks know that no other epoch follows.
    """

    def __init__(
        self,
        group: Group,
        changes: AgreedChanges,
        replicas: Replicas,
        position: StepLedger,
        parts: Sequence[ControlPart] = (),
        warn: Callable[[str], None] = logger.warning,
        is_last_epoch: Callable[[], bool] = lambda: False,
    ) -> None:
        self._group = group
        self._parts = list(parts)
        self._riding: list[tuple[ControlPart, int]] = []  # parts that have something to say, with how many numbers
        self._warn, self._is_last_epoch = warn, is_last_epoch
        self._reads_differ = False
        self._changes, self._replicas, self._position = changes, replicas, position
        self.announcer: Announcer = NoGroup()  # type: ignore[assignment]
        self._plan: DataPlan | MergeLayout | None = None
        self._ahead = False  # the last announcement was made by announce_ahead, and is not answered yet

    def add(self, *parts: ControlPart) -> None:
        """Add parts that send their values with the control sums; call this on all ranks before the first group."""
        self._parts.extend(parts)

    def set_group(self) -> None:
        """Set up announcements and control sums for the current group."""
        self._ahead = False
        sizes = [(part, part.size(self._group.world_size)) for part in self._parts]
        self._riding = [(part, size) for part, size in sizes if size]
        if self._group.members:
            self.announcer = Announcer(self._group.communicator, room=PAYLOAD_SIZE + sum(n for _, n in self._riding))

    def enter_group(self) -> None:
        """Enter a new group and discard the previous group's agreements and comparisons."""
        self._replicas.start(self._position.state.progress.steps)
        self._changes.start()
        for part in self._parts:
            if part.resting is None:
                part.start()

    def announce(
        self, what: Announced, payload: Sequence[float] = (), plan: DataPlan | MergeLayout | None = None
    ) -> None:
        """Announce this rank's next action. Call :meth:`agreed` before starting the action's collectives.

        Args:
            plan: Facts to compare with those of the other ranks; None to compare parameters instead, if requested.

        Raises:
            RanksDisagreeError: this rank has not completed its previous announcement.
            ReplicasDifferError: facts that were announced ahead differ.
        """
        if self._ahead:
            self._complete_ahead()
        fingerprint, self._plan = 0, plan
        if plan is not None:
            fingerprint = plan.fingerprint
        elif self._compares(what):
            fingerprint = self._replicas.fingerprint(self._position.state.progress.steps)
            self._changes.compared()
        self.announcer.start(what, self._position.state.progress.loader_steps, fingerprint=fingerprint, payload=payload)

    def announce_ahead(self, what: Announced, plan: DataPlan) -> None:
        """Announce an action without collectives; this rank's next announcement waits for the other ranks' first.

        Args:
            plan: Facts that the next announcement compares with the other ranks' facts.
        """
        self.announce(what, plan=plan)
        self._ahead = True

    def _complete_ahead(self) -> None:
        self._ahead = False
        self.agreed()
        self.announcer.done()

    def announce_reductions(self, what: Announced, *, known: bool) -> bool:
        """Announce that this rank will reduce gradients next, unless the announcement is unnecessary.

        Args:
            known: True if all ranks have made these reductions before, and cannot make any others.

        Returns True if :meth:`agreed` must be called before the results are used.

        Raises RanksDisagreeError if this rank has not completed its previous announcement.
        """
        if known and not self._ahead and not self._compares(what):
            self.announcer.start_quietly(what, self._position.state.progress.loader_steps)
            return False
        self.announce(what)
        return True

    def _compares(self, what: Announced) -> bool:
        """True if this announcement must include a comparison of parameters."""
        steps, saves = self._position.state.progress.steps, what.intent is Intent.BUFFERS
        if what.index == 0 and what.intent is Intent.END_OF_PASS:
            self._replicas.end_pass()
        if what.index == 0 and (saves or what.intent is Intent.END_OF_PASS):
            always = saves or self._changes.comparison or self._is_last_epoch()
            return self._replicas.due(steps, at_end=True, always=always)
        asked = self._changes.comparison
        may = what.intent is Intent.GRADIENTS and (asked or steps >= self._replicas.next_check)
        return may and self._replicas.due(steps, always=asked)

    def agreed(self) -> list[float]:
        """Wait until all ranks have announced the same action, and return the sums of their payloads.

        Raises:
            CommunicationFailedError: the group broke.
            RanksDisagreeError: the ranks announced different actions; raised on every rank.
            ReplicasDifferError: the ranks hold different parameters or data; raised on every rank.
        """
        communicator, compared = self._group.communicator, self._replicas if self._plan is None else self._plan
        with communicator.together():  # one worker of a unit may find a difference, and others none
            sums = self.announcer.agree()
            compared.compare(communicator, self.announcer.fingerprints)
        return sums

    def agree_on(
        self, what: Announced, payload: Sequence[float] = (), plan: DataPlan | MergeLayout | None = None
    ) -> list[float]:
        """Announce an action and wait for the other ranks, like :meth:`announce` followed by :meth:`agreed`."""
        self.announce(what, payload, plan)
        sums = self.agreed()
        self.announcer.done()
        return sums

    def announce_finished(self, what: Announced, wait_s: float, fingerprint: int = 0) -> list[int]:
        """Announce that this rank no longer needs other ranks; return the fingerprints from all ranks.

        The result is empty if any rank has not announced the same within ``wait_s`` [s].
        """
        if self._ahead:
            self._complete_ahead()
        if self.announcer.announce_finished(what, self._position.state.progress.loader_steps, wait_s, fingerprint):
            return self.announcer.fingerprints
        return []

    @property
    def control_size(self) -> int:
        """Number of control values in each of the current group's gradient reductions."""
        return CONTROL_SIZE + sum(part.size(self._group.world_size) for part in self._parts)

    def control_values(self, rank: int) -> list[float]:
        """Return this rank's control values, which are summed over the ranks (``control_size``; exact in float32)."""
        return self._changes.values(rank) + self._part_values(rank)

    def _part_values(self, rank: int) -> list[float]:
        values, world_size = list[float](), self._group.world_size
        for part, _ in self._riding:
            values.extend(part.values(rank, world_size) if part.resting is None else part.resting)
        return values

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """Draw conclusions from control values summed over all ranks, in the same way on every rank."""
        self._changes.conclude(sums[:CONTROL_SIZE], world_size)
        if self._changes.ran_out:
            self._position.fail(RAN_OUT)
        if self._riding:
            self._conclude_parts(sums[CONTROL_SIZE:], world_size)

    def _conclude_parts(self, sums: Sequence[float], world_size: int) -> None:
        first = 0
        for part, size in self._riding:
            if part.resting is None:
                part.conclude(sums[first : first + size], world_size)
            first += size

    def step_tag(self, note: int = 0) -> tuple[float, float]:
        """Return the tag that this rank adds to a reduction, for :meth:`check_same_step` to compare steps.

        Args:
            note: 1 if the gradients include the last update's, otherwise 0.
        """
        step = self._position.outermost
        sample_tag = step.sample_tag if step is not None and not self._reads_differ else 0
        return Announcer.step_tag(self._position.state.progress.loader_steps, sample_tag + note)

    def check_same_step(self, tags: Sequence[float], note: int = 0) -> None:
        """Check that all ranks have reduced gradients of the same step; raises like :meth:`Announcer.check_same_step`.

        If ranks have read different samples for the step, a warning is issued once, because random augmentation may
        explain the difference.
        """
        if not self.announcer.check_same_step(tags, note):
            self._reads_differ = True
            self._warn(_READS_DIFFER)

    def _join_collectives(self, end: Announced, join: Callable[[Announced], None]) -> None:
        """Participate in collectives with ranks that have samples until all reach the step's end; see :meth:`vote`."""
        while True:
            self.announce(Announced(Intent.IDLE, end.index, end.detail))
            self.agreed()
            does = self.announcer.joined_by_idle
            assert does is not None, "else it is refused"
            if does.intent is not Intent.EDGE:
                join(does)
            self.announcer.done()
            if does.intent is Intent.EDGE:
                return

    def vote(
        self,
        what: Announced,
        added: Sums,
        *,
        some_are_idle: bool = False,
        join: Callable[[Announced], None] | None = None,
        plan: DataPlan | MergeLayout | None = None,
    ) -> list[tuple[tuple[int, int], str, float]]:
        """Vote (sum the ranks' control values) in a separate collective, and sum all values added to accumulators.

        Args:
            some_are_idle: True if some ranks have no samples in this step; they do not know the names that other ranks
                use.
            join: On a rank without samples, participates in an action that the other ranks have announced; None on
                other ranks.
            plan: Facts to compare with the other ranks' facts; None to compare nothing.

        Returns the accumulator, name and sum of each value, in the same order on every rank.

        Raises:
            CommunicationFailedError: the group broke.
            RanksDisagreeError: the ranks are not at the same point in the program.
            RuntimeError: the ranks have added values under different names.
        """
        communicator = self._group.communicator
        if some_are_idle:
            if join is None:
                self.agree_on(what)
            else:
                self._join_collectives(what, join)
            added = with_names_of_first_rank(communicator, added)
        commits = what.intent is Intent.EDGE and what.index == 1
        own = self._part_values(communicator.rank) if commits else []

        def agree(payload: Sequence[float]) -> Sequence[float]:
            padding = [0.0] * (PAYLOAD_SIZE - len(payload))
            sums = self.agree_on(what, [*payload, *padding, *own], plan)
            if commits:
                self._conclude_parts(sums[PAYLOAD_SIZE:], communicator.world_size)
            return sums[: len(payload)]

        if commits and communicator.world_size == 1:
            self._conclude_parts(own, 1)
        return self._changes.vote(communicator, added, agree)
