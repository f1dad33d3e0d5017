"""SHELL: changes of group and batch: what the ranks have agreed on, and what a failure makes necessary."""

from __future__ import annotations

from collections.abc import Callable

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.membership.messages import GenerationSpec
from elastic_ray.membership.rendezvous import CommunicationFailedError, Communicator
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.session.controller_client import ControllerClient
from elastic_ray.session.group_entry import GroupEntry
from elastic_ray.session.registry import HookPoint
from elastic_ray.session.run_state import RunState
from elastic_ray.session.transitions import GroupTransitions, WorkerDismissed

# Steps that a planned change of group waits for gradients that are different on each rank.
_LONGEST_WAIT = 1000


class GroupChanges:
    """See the module's text.

    Args:
        parts: of the run.
        membership: this worker's side of the membership protocol.
        controller: is told of failures and changes.
        moment: a named moment of the run, for scripted faults.
        elastic: whether the group may change.
        explain: why a collective of a group that cannot change has failed, from what that says itself.
        regroup_timeout_s: longest wait for a generation to go on with.

    Attributes:
        shape_changes: how often the group or the batch shape has changed.
    """

    def __init__(
        self,
        parts: RunState,
        membership: WorkerMembership,
        controller: ControllerClient,
        moment: Callable[[str], None],
        *,
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
        self._entry = GroupEntry(
            parts.states,
            parts.registry,
            parts.consensus,
            begin=self._begin_group,
            set_shape=self._set_shape,
            switched=controller.switched,
            moment=moment,
        )
        self._transitions = GroupTransitions(
            membership, controller, self._enter, moment, regroup_timeout_s=regroup_timeout_s
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
        if self._parts.agreed.stop or self._parts.agreed.preempted:
            raise WorkerDismissed(stopped=True)
        self._parts.registry.call(HookPoint.BETWEEN_STEPS)
        batch = self._parts.agreed.take_batch()
        if self._parts.agreed.generation:
            generation = self._parts.agreed.take_generation()
            if not self._waits_for_gradients():
                self._transitions.switch(generation, can_switch)
        elif batch is not None and batch != self._parts.states.shape:
            self._set_shape(batch)

    def _waits_for_gradients(self) -> bool:
        """Whether a planned change is put off: gradients that ``no_sync`` has left on each rank would be lost by it."""
        self._steps_waited = self._steps_waited + 1 if self._parts.registry.gradients_are_local else 0
        return 0 < self._steps_waited <= _LONGEST_WAIT

    def regroup(self, cause: str) -> int:
        """Find a group to go on with; returns the loader passes that its furthest rank has ended.

        Raises:
            CommunicationFailedError: the group is one that cannot change.
        """
        if not self._elastic:
            raise CommunicationFailedError(self._explain(cause))
        return self._transitions.regroup(cause, self._parts.group.generation)

    def _enter(self, spec: GenerationSpec, communicator: Communicator) -> int:
        try:
            return self._entry(spec, communicator)
        except CommunicationFailedError as error:
            if not self._elastic:  # there will be no other group
                self._membership.give_up(self._explain(str(error)))
            raise

    def _begin_group(self) -> float:
        """All ranks of a new group are identical; returns the time since the last committed step [s]."""
        self._steps_waited = 0
        pause_s = self._parts.clock.resume()
        self._parts.ledger.clear_failure()
        return pause_s

    def _set_shape(self, shape: BatchChoice | None) -> None:
        self._parts.states.set_shape(shape)
        self.shape_changes += 1
        self._parts.registry.call(HookPoint.SHAPE_CHANGED)
