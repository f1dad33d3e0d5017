"""Changes of group and batch, between fakes of what they need of a run, of its membership and of its controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.consensus.saving import Readiness, SaveAgreement
from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.run.dismissal import WorkerDismissed
from elastic_ray.run.registry import HookPoint
from elastic_ray.session.group_changes import GroupChanges
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.proof import Link
from elastic_ray.state.shared_state import Exchanged

SHAPE = BatchChoice(atomic_bsz=4)
OTHER = BatchChoice(atomic_bsz=8, accum_steps=1)


def generation(number: int) -> GenerationSpec:
    return GenerationSpec(generation=number, members=(Member(worker="a", node="n1"),))


class Peers:
    """A communicator of which only the sizes matter."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        """Each further rank needs one sample more; all hold the same."""
        more = len(values) == 1
        return [[value + rank * more for value in values] for rank in range(self.world_size)]


class Group:
    """A group that consists of this rank."""

    generation = 1
    world_size = 1
    members = (Member(worker="a", node="n1"),)
    communicator: Any = "the group"

    def follow(self) -> None: ...


class States:
    """The shared state, whose exchange fails so many times."""

    unique = joined = False

    def alike(self) -> dict[str, Any]:
        return {}

    def __init__(self, failing: int) -> None:
        self.shape: BatchChoice | None = SHAPE
        self.failing, self.done = failing, list[Any]()

    def set_shape(self, shape: BatchChoice | None) -> None:
        self.shape = shape
        self.done.append(shape)

    def exchange(self, communicator: Any, replicas: Any, samples: int | None) -> Exchanged:
        self.done.append("exchange")
        self.failing -= 1
        if self.failing >= 0:
            raise CommunicationFailedError("broke")
        return Exchanged(received=False, passes=5)


class Registered:
    """What was registered; notes the hooks that are called."""

    buffer_layout, marker, gradients_are_local, samples, in_parts, drifts = 7, 0, False, None, False, False

    def __init__(self) -> None:
        self.saving = SaveAgreement()
        self.called: list[HookPoint] = []
        self.equalised, self.collapsed, self.breaks, self.done = 0, 0, False, list[Any]()

    def call(self, point: HookPoint) -> None:
        self.called.append(point)

    def before_change(self, stays: Sequence[bool]) -> None:
        assert stays == [True]
        self.equalised += 1
        if self.breaks:
            raise CommunicationFailedError("broke before the change")

    def collapse(self, *, gather: bool) -> None:
        self.collapsed += 1
        if self.breaks:
            raise CommunicationFailedError("broke in a consensus")

    def prepare_to_save(self) -> None: ...

    def reconcile(self, communicator: Any, marker: int, *, holds: bool) -> None: ...

    least_share = 1

    def enter_group(self) -> None:
        self.done.append("enter")

    def ask_for_shares(self, least: int) -> None:
        self.done.append(("shares", least))

    def sync_buffers(self, communicator: Any) -> None:
        self.done.append("buffers")


class Steps:
    """Steps in progress, and whether a failure is forgotten; also the clock and the announcements."""

    depth, cleared = 0, False
    others, breaks = 0.0, False  # what other ranks add to an announcement

    def __init__(self) -> None:
        self.done = list[Any]()

    def clear_failure(self) -> None:
        self.cleared = True

    def change_begins(self) -> None: ...

    def group_stands(self) -> None: ...

    def resume(self, generation: int) -> Pause:
        return Pause(vote_s=0.5, group_s=0.75, state_s=0.25)

    def follow_group(self) -> None: ...

    def enter_group(self) -> None:
        self.done.append("consensus")

    def agree_on(self, what: Announced, payload: Sequence[float] = ()) -> list[float]:
        self.done.append(what.intent)
        if self.breaks:
            raise CommunicationFailedError("broke before it was known who waits")
        return [own + self.others for own in payload]


class Agreed:
    """What the ranks have agreed on."""

    stop = preempted = consensus = False
    generation = 0
    batch: BatchChoice | None = None

    def take_generation(self) -> int:
        taken, self.generation = self.generation, 0
        return taken

    def take_consensus(self) -> bool:
        taken, self.consensus = self.consensus, False
        return taken

    def take_batch(self) -> BatchChoice | None:
        taken, self.batch = self.batch, None
        return taken


class Membership:
    """This worker's side of the protocol: each generation that is asked for has been prepared."""

    worker, stop_requested, voided, gave_up = "a", False, False, ""
    called_off = leaves = lost = False

    def __init__(self) -> None:
        self.generation, self.standing = 1, True
        self.enters: Any = Peers(1)

    @property
    def current(self) -> GenerationSpec:
        return generation(self.generation)

    def prepared_spec(self, number: int) -> GenerationSpec | None:
        return generation(number) if self.standing else None

    def take(self, number: int) -> tuple[GenerationSpec, Any] | None:
        return None if self.called_off else self._take(number)

    def _take(self, number: int) -> tuple[GenerationSpec, Any]:
        self.generation = number
        return generation(number), None if self.leaves else self.enters

    def take_next(self, *, timeout_s: float) -> tuple[GenerationSpec, Any]:
        if self.lost:
            raise LostGroupError("none")
        return self._take(self.generation + 1)

    def give_up(self, why: str) -> None:
        self.gave_up = why


class Controller:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.failures, self.switches = list[tuple[int, str]](), list[tuple[int, float]]()

    def failed(self, number: int, cause: str) -> None:
        self.failures.append((number, cause))

    def switched(self, number: int, pause: Pause, proof: Link) -> None:
        self.switches.append((number, pause.pause_s))


class Held:
    """A batch that a policy has set."""

    shape: BatchChoice | None = None

    def held_shape(self) -> BatchChoice | None:
        return self.shape


class Run:
    """The parts that changes go through, and the changes themselves."""

    wishes = None

    def __init__(self, *, elastic: bool = True, failing: int = 0) -> None:
        self.states, self.registry, self.agreed = States(failing), Registered(), Agreed()
        self.ledger = self.clock = self.consensus = Steps()
        self.group, self.adaptation = Group(), Held()
        self.membership, self.controller = Membership(), Controller()
        self.worker, self.elastic, self.shape_changes, self.progress = "a", elastic, 0, RunProgress()
        self.done: list[Any] = []
        self.changes = GroupChanges(
            self,
            self.adaptation,
            SimpleNamespace(enter_group=lambda communicator, progress: self.done.append("collectives")),
            explain=lambda cause: f"explained: {cause}",
            regroup_timeout_s=1.0,
        )

    @property
    def voided(self) -> bool:
        return bool(self.membership.voided)

    def moment(self, name: str) -> None:
        self.done.append(name)

    def set_shape(self, shape: BatchChoice | None) -> None:
        self.states.set_shape(shape)
        self.shape_changes += 1
        self.registry.call(HookPoint.SHAPE_CHANGED)


def anywhere(world_size: int) -> bool:
    return True


def nowhere(world_size: int) -> bool:
    return False


def test_a_worker_joins_a_group_with_its_batch_shape() -> None:
    run = Run()
    run.changes.join(timeout_s=1.0)
    assert run.controller.switches == [(2, 1.5)] and run.ledger.cleared
    assert run.registry.called == [HookPoint.SHAPE_CHANGED] and run.shape_changes == 1
    assert run.states.shape == SHAPE


@pytest.mark.parametrize("unique", [True, False])
def test_a_joiner_reports_failure_if_it_alone_holds_state(unique: bool) -> None:
    run = Run(failing=1)
    run.states.unique = unique
    run.changes.join(timeout_s=1.0)
    assert run.controller.failures == ([(2, "broke")] if unique else [])
    assert run.controller.switches == [(3, 1.5)]


@pytest.mark.parametrize("what", ["stop", "preempted"])
def test_a_worker_is_dismissed_before_anything_else_happens(what: str) -> None:
    run = Run()
    setattr(run.agreed, what, True)
    run.agreed.generation = 2
    with pytest.raises(WorkerDismissed) as dismissed:
        run.changes.between_steps(anywhere)
    assert dismissed.value.stopped and run.registry.called == [] and run.membership.generation == 1
    assert run.registry.collapsed == int(what == "preempted"), "what is saved is one model"


@pytest.mark.parametrize("breaks", [True, False])
def test_models_are_made_one_before_rank_0_may_save(breaks: bool) -> None:
    run = Run()
    run.agreed.consensus, run.registry.breaks = True, breaks
    for _ in range(2):
        run.changes.between_steps(anywhere)
    assert run.registry.collapsed == 1
    assert run.controller.failures == ([(1, "broke in a consensus")] if breaks else [])


class Writer:
    """Writes its part of a checkpoint, once it is asked twice."""

    asked = 0

    def readiness(self, rank: int, world_size: int, *, now: bool) -> Readiness:
        self.asked += 1
        return self.standing()

    def standing(self) -> Readiness:
        return Readiness.READY if self.asked > 1 else Readiness.NOT_YET

    def begin(self) -> None: ...


class Two:
    """A group of two, of which this is the first rank."""

    generation = 1
    rank, world_size = 0, 2

    def follow(self) -> None: ...

    @property
    def communicator(self) -> Two:
        return self


@pytest.mark.parametrize(("in_parts", "drifts"), [(True, False), (True, True), (False, False)])
def test_a_step_s_sums_say_how_all_ranks_save(in_parts: bool, drifts: bool) -> None:
    """Unless models differ, or no rank has but a part: then they come together first, which breaks here."""
    run, writer = Run(), Writer()
    run.group, run.registry.in_parts, run.registry.drifts = Two(), in_parts, drifts
    run.consensus.breaks = True
    saving = run.registry.saving
    saving.serve(writer)
    orders = []
    for _ in range(3):
        values = saving.values(0, 2)
        saving.conclude([values[0], values[1], 2 * values[2], 2 * values[3]], 2)
        run.agreed.consensus = True
        run.changes.between_steps(anywhere)
        orders.append(saving.take_order())
    if in_parts and not drifts:
        assert orders[:2] == [None, None] and orders[2] is not None and writer.asked == 2
        assert run.registry.collapsed == 0 and run.controller.failures == []
    else:
        assert orders == [None] * 3 and len(run.controller.failures) == 3


def test_sums_of_an_earlier_step_say_nothing() -> None:
    run, writer = Run(), Writer()
    run.group, run.registry.in_parts = Two(), True
    saving, writer.asked = run.registry.saving, 2
    saving.serve(writer)
    saving.conclude([0.0, 7.0, 0.0, 0.0], 2)
    run.changes.between_steps(anywhere)
    run.agreed.consensus, run.consensus.breaks = True, True
    run.changes.between_steps(anywhere)  # of a step whose votes have brought the wish alone
    assert saving.take_order() is None
    assert run.controller.failures == [(1, "broke before it was known who waits")], "ranks asked each other"


def test_an_agreed_batch_is_set_once_and_where_different() -> None:
    run = Run()
    for batch in (OTHER, None, OTHER):
        run.agreed.batch = batch
        run.changes.between_steps(anywhere)
    assert run.states.shape == OTHER and run.shape_changes == 1
    assert run.registry.called.count(HookPoint.SHAPE_CHANGED) == 1
    assert run.registry.called.count(HookPoint.BETWEEN_STEPS) == 3


@pytest.mark.parametrize("can_switch", [anywhere, nowhere])
def test_an_agreed_generation_is_entered_where_it_suits(can_switch: Callable[[int], bool]) -> None:
    run = Run()
    run.agreed.generation, run.agreed.batch = 4, OTHER
    run.changes.between_steps(can_switch)
    assert run.controller.switches == ([(4, 1.5)] if can_switch(1) else [])
    assert run.states.shape == SHAPE, "a group comes with its own batch"
    assert run.registry.equalised == int(can_switch(1)), "only before a change, and once"


def test_group_breaking_before_a_change_is_left_as_usual() -> None:
    run = Run()
    run.agreed.generation, run.registry.breaks = 4, True
    run.changes.between_steps(anywhere)
    assert run.controller.failures == [(1, "broke before the change")]
    assert run.controller.switches == [(2, 1.5)]


def test_a_generation_called_off_is_not_prepared_for() -> None:
    run = Run()
    run.agreed.generation, run.membership.standing = 4, False
    run.changes.between_steps(anywhere)
    assert run.registry.equalised == 0, "other ranks may not come"


def test_ranks_answer_alike_whether_a_planned_change_waits() -> None:
    run = Run()
    run.group.world_size, run.consensus.others = 2, 1.0
    run.agreed.generation = 2
    run.changes.between_steps(anywhere)
    assert run.controller.switches == [] and run.registry.equalised == 0
    run.consensus.breaks, run.agreed.generation = True, 2
    run.changes.between_steps(anywhere)
    assert run.controller.failures == [(1, "broke before it was known who waits")]


def test_a_planned_change_waits_for_local_gradients_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.session.group_changes._LONGEST_WAIT", 3)
    run = Run()
    run.registry.gradients_are_local = True
    for _ in range(3):
        run.agreed.generation = 2
        run.changes.between_steps(anywhere)
        assert run.controller.switches == []
    run.agreed.generation = 2
    run.changes.between_steps(anywhere)
    run.agreed.generation = 3
    run.changes.between_steps(anywhere)
    assert run.controller.switches == [(2, 1.5)], "in the new group the wait begins anew"


def test_regrouping_continues_until_group_stands_and_tells_the_furthest() -> None:
    run = Run(failing=1)
    assert run.changes.regroup("lost") == 5
    assert run.controller.failures == [(1, "lost"), (2, "broke")]
    assert run.controller.switches == [(3, 1.5)]
    assert run.membership.gave_up == ""


def test_a_group_that_cannot_change_fails_with_an_explanation() -> None:
    run = Run(elastic=False)
    with pytest.raises(CommunicationFailedError, match=r"^explained: lost$"):
        run.changes.regroup("lost")
    assert run.controller.failures == [], "no other group is asked for"


def test_who_cannot_enter_an_unchanging_group_gives_up() -> None:
    run = Run(elastic=False, failing=1)
    run.changes.join(timeout_s=1.0)  # this membership gives another group all the same
    assert run.membership.gave_up == "explained: broke"


def test_a_policys_batch_goes_before_the_generations_and_jobs() -> None:
    run = Run()
    run.adaptation.shape = BatchChoice(atomic_bsz=7)
    run.agreed.batch = BatchChoice(atomic_bsz=3)
    run.changes.between_steps(anywhere)
    assert run.states.shape == BatchChoice(atomic_bsz=7)
    run.adaptation.shape, run.agreed.batch = None, BatchChoice(atomic_bsz=3)
    run.changes.between_steps(anywhere)
    assert run.states.shape == BatchChoice(atomic_bsz=3)


def test_a_generation_called_off_after_agreement_is_replaced() -> None:
    run = Run()
    run.agreed.generation, run.membership.called_off = 4, True
    run.changes.between_steps(anywhere)
    ((left, cause),) = run.controller.failures
    assert left == 4 and "called off" in cause and run.controller.switches == [(2, 1.5)]


def test_leavers_are_dismissed_and_everyone_when_the_job_stops() -> None:
    run = Run()
    run.membership.leaves = True
    with pytest.raises(WorkerDismissed) as left:
        run.changes.regroup("x")
    assert not left.value.stopped and run.done == ["leaving"]
    run.membership.lost = True
    with pytest.raises(LostGroupError):
        run.changes.regroup("x")
    run.membership.stop_requested = True
    with pytest.raises(WorkerDismissed) as stopped:
        run.changes.regroup("x")
    assert stopped.value.stopped


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_group_is_entered_by_state_buffers_shape(world_size: int) -> None:
    run = Run()
    run.membership.enters = Peers(world_size)
    run.registry.done = run.consensus.done = run.states.done = run.done
    assert run.changes.regroup("x") == 5
    announced = [Intent.BUFFERS, ("shares", 2)] if world_size > 1 else []  # another rank has BatchNorm in training
    entered = ["receiving", "exchange", "enter", "consensus", *announced, "buffers", "received", "collectives", SHAPE]
    assert run.done == entered and run.controller.switches == [(2, 1.5)]
