"""SHELL: changes of group and batch: what the ranks have agreed on, and what a failure makes necessary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.consensus.saving import SaveAgreement, Saving
from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.session.group_entry import EntryConsensus, ExchangedState, GroupEntry, GroupParts
from elastic_ray.session.registry import HookPoint
from elastic_ray.session.transitions import FailureReports, GroupMembership, GroupTransitions, WorkerDismissed

# Steps that a planned change of group waits for gradients that are different on each rank.
_LONGEST_WAIT = 1000


class ChangedState(ExchangedState, Protocol):
    """The state that all ranks share, as a change of group or batch finds it."""

    @property
    def unique(self) -> bool:
        """Whether this worker's state would be lost with it."""

    def set_shape(self, shape: BatchChoice | None) -> None:
        """Take another batch shape, None for the loader's own."""


class ChangedParts(GroupParts, Protocol):
    """What a train function has registered, as far as changes concern it."""

    @property
    def gradients_are_local(self) -> bool:
        """Whether some gradients differ from rank to rank."""

    def call(self, point: HookPoint) -> None:
        """The run is at such a point."""

    @property
    def saving(self) -> SaveAgreement:
        """Whether all ranks write a checkpoint, or the first one."""

    @property
    def in_parts(self) -> bool:
        """Whether state lies with several ranks that each can write its part of."""

    @property
    def drifts(self) -> bool:
        """Whether some models differ from rank to rank by design."""

    def collapse(self, *, gather: bool = True) -> None:
        """Make models one that differ from rank to rank; raises CommunicationFailedError."""

    def prepare_to_save(self) -> None:
        """Have rank 0 hold what only others hold; raises CommunicationFailedError."""

    def before_change(self, stays: Sequence[bool]) -> None:
        """The present group is about to change; raises CommunicationFailedError where it broke meanwhile."""


class ChangedGroup(Protocol):
    """The present group."""

    @property
    def generation(self) -> int:
        """How often it has changed."""

    @property
    def world_size(self) -> int:
        """Its ranks."""

    @property
    def communicator(self) -> Communicator:
        """Its communicator."""


class ChangedSteps(Protocol):
    """The steps of this rank, as far as changes concern them."""

    @property
    def depth(self) -> int:
        """How many steps are in progress, one within the other."""

    def clear_failure(self) -> None:
        """A group was entered: what failed in another one is over."""


class Agreements(Protocol):
    """What the ranks have agreed on and not yet carried out."""

    @property
    def stop(self) -> bool:
        """The job stops for good."""

    @property
    def preempted(self) -> bool:
        """It stops to go on another time."""

    @property
    def generation(self) -> int:
        """Generation to go to, 0 for none."""

    def take_generation(self) -> int:
        """The same, once."""

    def take_consensus(self) -> bool:
        """Whether all ranks are to hold the same model now, once."""

    def take_batch(self) -> BatchChoice | None:
        """Batch shape to change to, once; None to go on as it is."""


class HeldBatch(Protocol):
    """A batch that policies of the user's have set."""

    def held_shape(self) -> BatchChoice | None:
        """How it is cut in the present group; None where the job chooses."""


class ChangeConsensus(EntryConsensus, Protocol):
    """Announcements of this rank, and what rides on them."""

    def agree_on(self, what: Announced, payload: Sequence[float] = ()) -> Sequence[float]:
        """Announce what comes next, and wait for the others; returns the sums of what rides along."""


class PauseClock(Protocol):
    """Times the pauses between groups."""

    def change_begins(self) -> None:
        """The ranks have agreed on another group, or the present one has failed."""

    def group_stands(self) -> None:
        """Another group has been formed."""

    def resume(self, generation: int) -> Pause:
        """A new generation begins: returns the time since the last committed step."""


class ChangedRun(Protocol):
    """The parts of a run that its changes of group and batch go through."""

    @property
    def states(self) -> ChangedState:
        """What all ranks share."""

    @property
    def registry(self) -> ChangedParts:
        """What the train function has built."""

    @property
    def group(self) -> ChangedGroup:
        """The present group."""

    @property
    def ledger(self) -> ChangedSteps:
        """Which step this rank is in."""

    @property
    def agreed(self) -> Agreements:
        """What the ranks have agreed on and not yet carried out."""

    @property
    def consensus(self) -> ChangeConsensus:
        """This rank's announcements."""

    @property
    def adaptation(self) -> HeldBatch:
        """Policies of the user's."""

    @property
    def clock(self) -> PauseClock:
        """Times of steps."""


class ChangingMembership(GroupMembership, Protocol):
    """This worker's side of the membership protocol."""

    @property
    def voided(self) -> bool:
        """Whether the present generation was called off."""

    def give_up(self, why: str) -> None:
        """There will be no other group."""


class ChangeReports(FailureReports, Protocol):
    """The controller, as far as it hears of changes."""

    def switched(self, generation: int, pause: Pause) -> None:
        """This worker trains in ``generation`` now, after this pause."""


class GroupChanges:
    """See the module's text.

    Args:
        parts: of the run.
        membership: this worker's side of the membership protocol.
        controller: is told of failures and changes.
        moment: a named moment of the run, for scripted faults.
        catch_up: gives results of user code's own collectives to ranks that are behind in a new group.
        elastic: whether the group may change.
        explain: why a collective of a group that cannot change has failed, from what that says itself.
        regroup_timeout_s: longest wait for a generation to go on with.

    Attributes:
        shape_changes: how often the group or the batch shape has changed.
        furthest_passes: loader passes that the present group's furthest rank had ended when it was formed.
    """

    def __init__(
        self,
        parts: ChangedRun,
        membership: ChangingMembership,
        controller: ChangeReports,
        moment: Callable[[str], None],
        *,
        catch_up: Callable[[Communicator], None],
        elastic: bool,
        explain: Callable[[str], str],
        regroup_timeout_s: float,
    ) -> None:
        self._parts = parts
        self._membership = membership
        self._elastic = elastic
        self._explain = explain
        self._steps_waited = 0  # for gradients that differ from rank to rank
        self.shape_changes = 0
        self.furthest_passes = 0
        self._entry = GroupEntry(
            parts.states,
            parts.registry,
            parts.consensus,
            catch_up=catch_up,
            begin=self._begin_group,
            set_shape=self.set_shape,
            switched=controller.switched,
            moment=moment,
        )
        self._transitions = GroupTransitions(
            membership,
            controller,
            self._enter,
            moment,
            before_change=parts.registry.before_change,
            regroup_timeout_s=regroup_timeout_s,
        )

    def join(self, *, timeout_s: float) -> None:
        """Become a member for the first time.

        Raises:
            WorkerDismissed: the job ended or shrank before this worker's turn came.
        """
        self._transitions.join(lambda: self._parts.states.unique, timeout_s=timeout_s)

    def check_group(self) -> None:
        """Before a step is cut: if the group was called off meanwhile, go on with the next one."""
        if self._parts.ledger.depth == 0 and self._membership.voided:
            self.regroup("the group was called off")

    def between_steps(self, can_switch: Callable[[int], bool]) -> None:
        """Carry out what the ranks have agreed on.

        Args:
            can_switch: whether a group of a given size may begin here.

        Raises:
            WorkerDismissed: this worker leaves, or the job stops.
        """
        if self._parts.agreed.preempted and not self._parts.agreed.stop:
            self._make_equal(ends=True)
        if self._parts.agreed.stop or self._parts.agreed.preempted:
            raise WorkerDismissed(stopped=True)
        heard = self._parts.registry.saving.take_heard(self._parts.group.world_size)
        if self._parts.agreed.take_consensus() and not self._saved_by_step(heard):
            self._make_equal()
        self._parts.registry.call(HookPoint.BETWEEN_STEPS)
        batch = self._parts.agreed.take_batch()
        if self._parts.agreed.generation:
            generation = self._parts.agreed.take_generation()
            try:
                waits = self._waits_for_gradients()
            except CommunicationFailedError as error:
                self.regroup(str(error))
                return
            if not waits:
                self._parts.clock.change_begins()
                self._transitions.switch(generation, can_switch)
        elif batch is not None and batch != self._parts.states.shape:
            self.set_shape(batch)

    def _saved_by_step(self, heard: Sequence[float]) -> bool:
        """Whether all ranks save by what was ``heard`` with the step's own sums: each its part, as it is, or later."""
        registry, group = self._parts.registry, self._parts.group
        if not heard or group.world_size == 1 or not registry.in_parts or registry.drifts:
            return False
        rank = group.communicator.rank
        saving = registry.saving.decide(heard, rank, group.world_size, now=False)
        if saving is Saving.LATER:
            registry.saving.prepare(rank, group.world_size)
        return saving is not Saving.ALONE

    def _make_equal(self, *, ends: bool = False) -> None:
        """Have all ranks hold the same model, those of another group if this one breaks.

        Then it is saved: by all ranks, where each has a part of it, or by the first one, which gets the whole.

        Args:
            ends: no step follows.
        """
        try:
            self._ready_to_save(ends=ends)
        except CommunicationFailedError as error:
            self._parts.registry.saving.begin()
            self.regroup(str(error))

    def _ready_to_save(self, *, ends: bool) -> None:
        """As :meth:`_make_equal`.

        Raises:
            CommunicationFailedError: the group broke.
        """
        saving = self._agree_on_saving(ends=ends)
        if saving is Saving.LATER:
            return
        alone = saving is Saving.ALONE
        self._parts.registry.collapse(gather=alone)
        self._parts.registry.sync_buffers(self._parts.group.communicator)
        if alone:
            self._parts.registry.prepare_to_save()

    def before_last_save(self) -> bool:
        """Have the ranks save together what the run ends with; False if the group broke. All ranks call it."""
        try:
            self._ready_to_save(ends=True)
        except CommunicationFailedError:
            self._parts.registry.saving.begin()
            return False
        return True

    def _agree_on_saving(self, *, ends: bool) -> Saving:
        """How the ranks save; all come here.

        Raises:
            CommunicationFailedError: the group broke.
        """
        registry, group = self._parts.registry, self._parts.group
        if group.world_size == 1:
            return Saving.ALONE
        rank, world = group.communicator.rank, group.world_size
        ballot = registry.saving.ballot(rank, world, divided=registry.in_parts, now=ends)
        # A rank that has waited for long may have an announcement under way, which nothing else may meet.
        sums = self._parts.consensus.agree_on(Announced(Intent.BUFFERS, 0, registry.buffer_layout), ballot)
        return registry.saving.decide(sums[: len(ballot)], rank, world, now=ends)

    def _waits_for_gradients(self) -> bool:
        """Whether a planned change is put off: gradients that ``no_sync`` has left on each rank would be lost by it.

        All ranks come here. They answer alike, though one may have left out an update that others have made.

        Raises:
            CommunicationFailedError: the group broke.
        """
        ranks = float(self._parts.registry.gradients_are_local)
        if self._parts.group.world_size > 1:
            # A rank that has waited for long may have an announcement under way, which nothing else may meet.
            ranks = self._parts.consensus.agree_on(Announced(Intent.EDGE), [ranks])[0]
        self._steps_waited = self._steps_waited + 1 if ranks else 0
        return 0 < self._steps_waited <= _LONGEST_WAIT

    def regroup(self, cause: str) -> int:
        """Find a group to go on with; returns the loader passes that its furthest rank has ended.

        Raises:
            CommunicationFailedError: the group is one that cannot change.
        """
        if not self._elastic:
            raise CommunicationFailedError(self._explain(cause))
        self._parts.clock.change_begins()
        return self._transitions.regroup(cause, self._membership.generation)

    def _enter(self, spec: GenerationSpec, communicator: Communicator) -> int:
        """Enter it; returns the loader passes that its furthest rank has ended."""
        self._parts.clock.group_stands()
        try:
            self.furthest_passes = self._entry(spec, communicator)
        except CommunicationFailedError as error:
            if not self._elastic:  # there will be no other group
                self._membership.give_up(self._explain(str(error)))
            raise
        return self.furthest_passes

    def _begin_group(self) -> Pause:
        """All ranks of a new group are identical; returns the time since the last committed step."""
        self._steps_waited = 0
        pause = self._parts.clock.resume(self._parts.group.generation)
        self._parts.ledger.clear_failure()
        return pause

    def set_shape(self, shape: BatchChoice | None) -> None:
        """Take another batch shape from the next step on, None for the loader's own; that of a policy goes first."""
        self._parts.states.set_shape(self._parts.adaptation.held_shape() or shape)
        self.shape_changes += 1
        self._parts.registry.call(HookPoint.SHAPE_CHANGED)
