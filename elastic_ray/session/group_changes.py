"""SHELL: changes of group and batch, and the train function's collectives, which survive such changes."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.consensus.saving import Saving
from elastic_ray.consensus.unit_wishes import UnitWishes
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.run.current import WorkerDismissed
from elastic_ray.run.registry import HookPoint
from elastic_ray.run.run import Run
from elastic_ray.session.adaptation import Adaptation
from elastic_ray.state.layout import ReplicasDifferError, digest
from elastic_ray.state.progress import Link, RunProgress
from elastic_ray.state.replicas import check_alike, difference, different_ranks, digest_of_tensors
from elastic_ray.state.tree import from_bytes, to_bytes

if TYPE_CHECKING:
    from elastic_ray.session.loader_passes import LoaderPasses

logger = logging.getLogger(__name__)

# Steps that a planned change of group waits for gradients that are different on each rank.
_LONGEST_WAIT = 1000


class GroupChanges:
    """Changes of this rank from one group to the next, and from one batch shape to another.

    Each method leaves this rank in a group, or raises ``WorkerDismissed`` or ``LostGroupError``.

    Args:
        adaptation: The user's policies, whose batch takes precedence.
        results: Results of user code's own collectives; in a new group, they are sent to ranks that are behind.
        explain: Returns why a collective failed in a group that cannot change, given the collective's own error.
    """

    def __init__(
        self,
        run: Run,
        adaptation: Adaptation,
        results: CollectiveResults,
        *,
        explain: Callable[[str], str],
        regroup_timeout_s: float,
    ) -> None:
        self._run, self._adaptation, self._results = run, adaptation, results
        self._membership, self._controller = run.membership, run.controller
        self._explain, self._regroup_timeout_s = explain, regroup_timeout_s
        self._steps_waited = 0  # for gradients that differ from rank to rank
        self.furthest_passes = 0  # loader passes that the present group's furthest rank had ended when it was formed

    def join(self, *, timeout_s: float) -> None:
        """Join a group for the first time, waiting up to ``timeout_s`` [s] for a group.

        Raises WorkerDismissed if the job ended or shrank before this worker joined.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._await_next(deadline - time.monotonic())
                return
            except CommunicationFailedError as error:
                # A joiner that could not enter waits for the next generation; only members have something to report.
                logger.info("worker %s: could not enter generation: %s", self._run.worker, error)
                if self._run.states.unique:
                    self._controller.failed(self._membership.generation, str(error))

    def between_steps(self, can_switch: Callable[[int], bool]) -> None:
        """Carry out the decisions that the ranks have agreed on.

        Args:
            can_switch: Returns True if a group of a given size may start at this point.

        Raises WorkerDismissed if this worker leaves or the job stops.
        """
        run, agreed = self._run, self._run.agreed
        if agreed.preempted and not agreed.stop:
            self._make_equal(ends=True)
        if agreed.stop or agreed.preempted:
            raise WorkerDismissed(stopped=True)
        saving = run.registry.saving
        heard = saving.pop_sums(run.group.world_size) if saving.resting is None else ()
        if agreed.pop_consensus() and not self._saved_by_step(heard):
            self._make_equal()
        run.registry.call(HookPoint.BETWEEN_STEPS)
        batch = agreed.pop_batch() if agreed.batch is not None else None
        if agreed.generation:
            self._switch(agreed.pop_generation(), can_switch)
        elif batch is not None and batch != run.states.shape:
            self._set_shape(batch)

    def _switch(self, generation: int, can_switch: Callable[[int], bool]) -> None:
        """Switch to the agreed generation, unless it must wait or its size is not possible at this point."""
        try:
            if self._waits_for_gradients():
                return
        except CommunicationFailedError as error:
            self.regroup(str(error))
            return
        run = self._run
        run.clock.change_begins()
        prepared = self._membership.prepared_spec(generation)
        if run.wishes is not None and not run.wishes.agree(prepared is not None):
            prepared = None
        if prepared is not None and not can_switch(prepared.world_size):
            return  # too few samples left in this pass for so many ranks: agreed on again at its end
        left = run.group.generation
        try:
            if prepared is not None:  # else the others find out that this rank has not come
                run.registry.before_change(
                    [prepared.rank_of(member.worker) is not None for member in self._run.group.members]
                )
                # A rank that leaves an NCCL group drops what it has not sent yet, and memory that its peers still use.
                run.group.communicator.gather_ints([0])
            left = generation
            taken = self._membership.take(generation)
            self._switch_group()
            if run.wishes is not None and not run.wishes.agree(taken is not None):
                taken = None
            if taken is None:
                raise CommunicationFailedError(f"generation {generation} was called off after it was agreed on")
            self._go_to(*taken)
        except CommunicationFailedError as error:
            self._regroup(str(error), left)

    def _waits_for_gradients(self) -> bool:
        """True if a planned change must wait, because it would lose gradients that ``no_sync`` has left on each rank.

        Call this on every rank. All ranks get the same answer, even if one has skipped an update that others have made.

        Raises CommunicationFailedError if the group breaks.
        """
        ranks = float(self._run.registry.gradients_are_local)
        if self._run.group.world_size > 1:
            # A rank that has waited for long may have an announcement under way, which nothing else may meet.
            ranks = self._run.consensus.agree_on(Announced(Intent.EDGE), [ranks])[0]
        self._steps_waited = self._steps_waited + 1 if ranks else 0
        return 0 < self._steps_waited <= _LONGEST_WAIT

    def regroup(self, cause: str) -> int:
        """Enter a new group after a failure; return how many loader passes the group's furthest rank has ended.

        Raises CommunicationFailedError if the group cannot change.
        """
        if not self._run.elastic:
            raise CommunicationFailedError(self._explain(cause))
        self._run.clock.change_begins()
        return self._regroup(cause, self._membership.generation)

    def _regroup(self, cause: str, generation: int) -> int:
        """Wait for the next generation and enter it; return the number of passes that its furthest rank has ended."""
        while True:
            self._controller.failed(generation, cause)
            try:
                return self._await_next(self._regroup_timeout_s)
            except CommunicationFailedError as error:
                cause, generation = str(error), self._membership.generation

    def _await_next(self, timeout_s: float) -> int:
        """Wait for a group and enter it; return the number of loader passes that its furthest rank has ended."""
        if self._run.wishes is None:
            spec, communicator = self._taken(timeout_s)
        else:
            spec, communicator = self._taken_by_unit(self._run.wishes, timeout_s)
        self._switch_group()
        return self._go_to(spec, communicator)

    def _taken(self, timeout_s: float) -> tuple[GenerationSpec, Communicator | None]:
        """Return the group to continue with."""
        try:
            return self._membership.await_next(timeout_s=timeout_s)
        except LostGroupError:
            if self._membership.stop_requested:
                raise WorkerDismissed(stopped=True) from None
            raise

    def _taken_by_unit(self, wishes: UnitWishes, timeout_s: float) -> tuple[GenerationSpec, Communicator | None]:
        """Return the same next group on all workers in a unit, even if one missed that a group was called off."""
        taken, ended = None, None
        newest = 1
        while True:
            try:
                if ended is None and (taken is None or taken[0].generation < newest):
                    taken = self._taken(timeout_s)
            except (LostGroupError, WorkerDismissed) as error:
                ended = error
            told = wishes.alike(0.0 if ended is not None or taken is None else float(taken[0].generation))
            if min(told) == 0.0:
                raise ended or LostGroupError("another worker of the unit has no group to continue with")
            newest = round(max(told))
            if taken is not None and min(told) == newest:
                return taken

    def _switch_group(self) -> None:
        """Switch the run to the membership's current group."""
        self._run.group.adapt()
        self._run.consensus.set_group()

    def _go_to(self, spec: GenerationSpec, communicator: Communicator | None) -> int:
        """Enter a formed group; return the number of loader passes that its furthest rank has ended."""
        if communicator is None:
            self._run.moment("leaving")
            self._run.leave_group()
            raise WorkerDismissed(stopped=False)
        self._run.clock.group_stands()
        try:
            self.furthest_passes = self._enter(spec, communicator)
        except CommunicationFailedError as error:
            if not self._run.elastic:  # there will be no other group
                self._membership.give_up(self._explain(str(error)))
            raise
        return self.furthest_passes

    def _enter(self, spec: GenerationSpec, communicator: Communicator) -> int:
        """Exchange state in a newly formed group until all ranks are bit-identical.

        Raises:
            CommunicationFailedError: The group broke during the exchange. This rank's state is complete, or it has
                none.
            ReplicasDifferError: The ranks train on datasets of different lengths, or have built different objects.
        """
        run, registry = self._run, self._run.registry
        run.moment("receiving")
        reports = run.progress.reports
        exchanged = run.states.exchange(communicator, registry, registry.samples, run.ledger)
        if run.ledger.has_left:
            run.states.progress.advance_passes(exchanged.passes)
            if exchanged.behind and run.ledger.depth_in_group == 0 and run.ledger.outermost is not None:
                run.ledger.outermost.loader_pass.end()
        with communicator.together():
            proof = self._set_up(spec, communicator, nested=exchanged.nested)
        self._steps_waited = 0
        if run.wishes is not None:
            run.wishes.start()
        pause = run.clock.resume(run.group.generation)
        # Not before: nothing is to follow a proof that is not reported. But ranks that have left steps copy it next.
        run.states.progress.proof = proof.link
        run.ledger.clear_failure()
        if run.ledger.has_left:  # others may have made the reports that follow in its code
            run.progress.reports = reports
        self._set_shape(spec.batch or run.states.shape)
        self._controller.switched(spec.generation, pause, proof)
        return exchanged.passes

    def _set_up(self, spec: GenerationSpec, communicator: Communicator, *, nested: bool) -> Link:
        """Set up a group whose ranks hold equal state, and return the proof of that; raises like :meth:`_enter`.

        Args:
            nested: True if options of optimizers may differ, because one rank has run further code of a lost step.
        """
        run, registry = self._run, self._run.registry
        registry.enter_group()
        run.consensus.enter_group()
        if communicator.world_size > 1:
            run.consensus.agree_on(Announced(Intent.BUFFERS, int(nested), registry.buffer_layout))
            # One rank may be about to evaluate its model, and a joiner's be in another mode, but all cut steps alike.
            gives_back = bool(registry.drifting) and run.unit is None and registry.gives_back
            rows = communicator.gather_ints(
                [registry.least_share, int(gives_back), registry.pulling, int(registry.sends_in_pairs)]
            )
            if any(row[3] for row in rows):
                communicator.connect_pairs()
            registry.least_share = max(registry.least_share, *(row[0] for row in rows))
            run.shares.enter(
                communicator, wanted=all(row[1] for row in rows), called_off=lambda: self._membership.voided
            )
            if len({row[2] for row in rows}) == 1:  # else their first vote says how they differ
                registry.enter_exchanges(communicator)
        else:
            run.shares.close()
        registry.sync_buffers(communicator)
        proof = self._prove(spec, communicator)
        self._results.enter_group(communicator, run.progress)
        return proof

    def _prove(self, spec: GenerationSpec, communicator: Communicator) -> Link:
        """Compare the state that must be identical on all ranks, before the first step of a group.

        Raises:
            CommunicationFailedError: The group broke, or a joiner differs (the joiner itself raises
                ReplicasDifferError).
            ReplicasDifferError: Members differ among themselves, which is raised on every rank, or this rank is a
                joiner and differs from the members.
        """
        run, progress = self._run, self._run.progress
        run.moment("received")
        tensors = {} if run.registry.drifts else run.states.alike()
        own = [digest_of_tensors(list(tensors.values())), int(run.states.joined), progress.proof, progress.ended_passes]
        rows = communicator.gather_ints(own)
        if any(row[2] != rows[0][2] for row in rows):  # not all have come to the end of a pass that is proven
            self._share_proof(communicator, max(range(len(rows)), key=lambda rank: rows[rank][3]))
        joined = [bool(row[1]) for row in rows]
        if different := different_ranks([row[0] for row in rows], joined):
            told = difference(communicator, tensors, different)
            check_alike(different, joined, told, progress.steps)
            if not run.elastic or communicator.rank in different:
                raise ReplicasDifferError(
                    f"this worker does not hold the state that it was sent when it joined: {told}"
                )
            raise CommunicationFailedError(f"a joining worker does not hold the state that it was sent: {told}")
        return Link.after(
            progress.proof,
            {
                "step": progress.steps,
                "epoch": progress.epoch,
                "positions": [each.position for each in progress.passes],
                "members": [member.worker for member in spec.members],
                "batch": None if run.states.shape is None else dataclasses.asdict(run.states.shape),
                "digest": own[0],
                "bytes": sum(each.numel() * each.element_size() for each in tensors.values()),
            },
        )

    def _share_proof(self, communicator: Communicator, source: int) -> None:
        """Adopt the latest link of rank ``source``, and the pass that it proves; raises CommunicationFailedError."""
        progress = self._run.progress
        told = communicator.broadcast_bytes(to_bytes([progress.proof, progress.last_pass]), source)
        try:
            progress.proof, progress.last_pass = from_bytes(told)
        except (ValueError, TypeError) as error:
            communicator.mark_broken()
            raise CommunicationFailedError(f"rank {source}: {error}") from error

    def _set_shape(self, shape: BatchChoice | None) -> None:
        """Set a new batch shape, unless a policy has set one."""
        held = self._adaptation.held_shape() if self._adaptation.active else None
        self._run.set_shape(held or shape)

    def _saved_by_step(self, heard: Sequence[float]) -> bool:
        """True if each rank saves its own part, now or later, according to the votes ``heard`` with the step's sums."""
        registry, group = self._run.registry, self._run.group
        if not heard or group.world_size == 1 or not registry.in_parts or registry.drifts:
            return False
        rank = group.communicator.rank
        saving = registry.saving.decide(heard, rank, group.world_size, now=False)
        if saving is Saving.LATER:
            registry.saving.prepare(rank, group.world_size)
        return saving is not Saving.ALONE

    def _make_equal(self, *, ends: bool = False) -> None:
        """Make the model identical on all ranks, or adopt another group's model if this group breaks.

        The model can then be saved: by all ranks if each holds a part of it, or by the first rank, which receives all
        of it.
        """
        try:
            self._ready_to_save(ends=ends)
        except CommunicationFailedError as error:
            self._run.registry.saving.start()
            self.regroup(str(error))

    def _ready_to_save(self, *, ends: bool) -> None:
        """Prepare the ranks to save in the way they agree on: together, alone or later.

        Raises CommunicationFailedError if the group breaks.
        """
        saving = self._agree_on_saving(ends=ends)
        if saving is Saving.LATER:
            return
        alone = saving is Saving.ALONE
        self._run.registry.collapse(gather=alone)
        self._run.registry.sync_buffers(self._run.group.communicator)
        if alone:
            self._run.registry.prepare_to_save()

    def before_last_save(self) -> bool:
        """Prepare the ranks to save the run's final state; False if the group broke. Call this on every rank."""
        try:
            self._ready_to_save(ends=True)
        except CommunicationFailedError:
            self._run.registry.saving.start()
            return False
        return True

    def _agree_on_saving(self, *, ends: bool) -> Saving:
        """Agree on how to save; called on every rank. Raises CommunicationFailedError if the group breaks."""
        registry, group = self._run.registry, self._run.group
        if group.world_size == 1:
            return Saving.ALONE
        rank, world = group.communicator.rank, group.world_size
        ballot = registry.saving.ballot(rank, world, divided=registry.in_parts, now=ends)
        # A rank that has waited for long may have an announcement under way, which nothing else may meet.
        sums = self._run.consensus.agree_on(Announced(Intent.BUFFERS, 0, registry.buffer_layout), ballot)
        return registry.saving.decide(sums[: len(ballot)], rank, world, now=ends)


_MOST_KEPT_BYTES = 1 << 28
_NUMBERS = 255  # that a rank tells the others, beside 0 for one within a step


@dataclasses.dataclass(slots=True)
class CollectiveResults:
    """Recorded results of user code's collectives since all ranks were last known to be at the same point."""

    first: int = 0
    contents: list[bytes] = dataclasses.field(default_factory=list)
    place: tuple[int, int] = (0, 0)  # committed steps and ended passes then

    def start(self, number: int, place: tuple[int, int]) -> None:
        """Discard recorded results once all ranks have reached a new ``place``, after ``number`` collectives."""
        if place != self.place:
            self.first, self.contents, self.place = number, [], place

    def keep(self, content: bytes) -> None:
        """Keep the result of the next collective; drop the oldest results beyond the memory limit."""
        self.contents.append(content)
        while len(self.contents) > 1 and sum(map(len, self.contents)) > _MOST_KEPT_BYTES:
            self.contents.pop(0)
            self.first += 1

    def of(self, number: int) -> bytes | None:
        """Return the result of the collective with index ``number`` in the run; None if it is not kept."""
        index = number - self.first
        return self.contents[index] if 0 <= index < len(self.contents) else None

    def enter_group(self, communicator: Communicator, progress: RunProgress) -> None:
        """Exchange recorded results in a new group, so that ranks that are behind get them from a furthest rank."""
        mine, place = progress.collectives, _place(progress)
        self.start(mine, place)
        rows = communicator.gather_ints([mine, self.first])
        furthest = max(number for number, _ in rows)
        if all(number == furthest for number, _ in rows):
            return
        first, source = min((first, rank) for rank, (number, first) in enumerate(rows) if number == furthest)
        told = communicator.broadcast_bytes(to_bytes([first, *self.contents]), source)
        if mine == furthest:
            return
        try:
            self.first, *self.contents = from_bytes(told)
        except ValueError as error:
            communicator.mark_broken()
            raise CommunicationFailedError(f"rank {source}: {error}") from error
        self.place = place


def _place(progress: RunProgress) -> tuple[int, int]:
    return progress.loader_steps, progress.ended_passes


class UserCollectives:
    """Collectives of the train function, whose results survive changes of the group."""

    def __init__(self, run: Run, changes: GroupChanges, passes: LoaderPasses, results: CollectiveResults) -> None:
        self._run, self._changes, self._passes, self._results = run, changes, passes, results

    def next_known(self) -> bytes | None:
        """Return the next collective's recorded result while this worker replays code between steps; otherwise None."""
        progress, kept = self._run.progress, self._results
        if not kept.contents or self._run.ledger.depth or kept.place != _place(progress):
            return None
        return kept.of(progress.collectives)

    def call(
        self, what: str, detail: object, perform: Callable[[Communicator], bytes], alone: Callable[[], bytes]
    ) -> bytes:
        """Execute a collective and return its result as bytes.

        Args:
            what: Name of the collective, for comparison across ranks and for messages.
            detail: Additional facts that must be equal on all ranks.
            alone: Returns the result for this rank alone: before it has joined, during catch-up, and in a step that is
                already lost.

        Raises:
            WorkerDismissed: The job ended or shrank during the call.
            RanksDisagreeError: The ranks make different calls.
            RuntimeError: This worker joined within code whose results are no longer held by any rank.
        """
        if self._run.ledger.replays_passes or not self._run.group.generation:
            return alone()
        self._passes.complete()
        self._run.refuse_in_round(
            f"{what}() may not be called", "add up numbers in an elastic_ray.Accumulator, or call it after the pass"
        )
        if self._run.ledger.depth:
            return self._within_step(Announced(Intent.COLLECTIVE, 0, digest((what, detail)), what), perform, alone)
        while True:
            number = self._run.progress.collectives
            self._run.ledger.reach_collective(number)
            self._results.start(number, _place(self._run.progress))
            known = self._results.of(number)
            if known is not None:
                self._run.progress.count_collective()
                return known
            if number < self._results.first:
                raise RuntimeError(
                    f"this worker joined the job within code that makes collectives, and the result of {what}() was "
                    "discarded: the results between two passes over loaders exceeded 256 MiB"
                )
            announced = Announced(Intent.COLLECTIVE, 1 + number % _NUMBERS, digest((what, detail)), what)
            self._run.progress.meeting = True
            try:
                content = self._carried_out(announced, perform, alone)
            except CommunicationFailedError as error:
                self._changes.regroup(str(error))
                continue
            self._results.keep(content)
            self._run.progress.count_collective()
            return content

    def _carried_out(
        self, announced: Announced, perform: Callable[[Communicator], bytes], alone: Callable[[], bytes]
    ) -> bytes:
        """Execute a collective and return its result; raises CommunicationFailedError or RanksDisagreeError."""
        self._run.moment("collective")
        if self._run.group.world_size == 1:
            return alone()
        if self._run.consensus.announcer.in_phase:
            self._run.consensus.announcer.interject(announced)
        else:
            self._run.consensus.agree_on(announced)
        with self._run.group.communicator.together():  # workers of a unit may give tensors of unlike kinds
            content = perform(self._run.group.communicator)
        self._run.moment("after_collective")
        return content

    def _within_step(
        self, announced: Announced, perform: Callable[[Communicator], bytes], alone: Callable[[], bytes]
    ) -> bytes:
        """Execute a collective within a step and return its result; if the group breaks, the step is lost."""
        if self._run.ledger.failed:
            return alone()
        try:
            return self._carried_out(announced, perform, alone)
        except CommunicationFailedError as error:
            self._run.ledger.fail(str(error))
            return alone()
