"""The parts of a session, each alone between fakes of a few lines."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.reports import LoaderInfo, ModelInfo
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.changes import AgreedChanges
from elastic_ray.consensus.consensus import RankConsensus
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec, Member, RankInfo
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.session.group import Group
from elastic_ray.session.group_entry import GroupEntry
from elastic_ray.session.registry import HookPoint, Registry
from elastic_ray.session.transitions import GroupTransitions, WorkerDismissed
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.shared_state import Exchanged, SharedState
from elastic_ray.steps.ledger import StepLedger
from placement.goodput.model import NoiseScale

SPEC = GenerationSpec(generation=2, members=(Member(worker="a", node="n1"), Member(worker="b", node="n1")))


class Peers:
    """A communicator of which only the sizes matter."""

    rank, world_size = 0, 1

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        """Each further rank has one more."""
        return [[value + rank for value in values] for rank in range(self.world_size)]


class Worker:
    """A worker's side of the membership protocol, with the groups that it is going to find; None: none comes."""

    worker, stop_requested, preempting, prepared_ahead, voided = "a", False, False, 0, False
    wanted_batch: BatchChoice | None = None

    def __init__(self, *groups: tuple[GenerationSpec, Any] | None) -> None:
        self._groups = list(groups)
        self.generation, self.current, self.communicator = 1, None, Peers()

    def prepared_spec(self, generation: int) -> GenerationSpec | None:
        return self._groups[0][0] if self._groups and self._groups[0] is not None else None

    def take(self, generation: int) -> tuple[GenerationSpec, Any] | None:
        return self._groups.pop(0)

    def take_next(self, *, timeout_s: float) -> tuple[GenerationSpec, Any]:
        if (found := self._groups.pop(0)) is None:
            raise LostGroupError("none")
        return found


class Controller:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.failures: list[tuple[int, str]] = []

    def failed(self, generation: int, cause: str) -> None:
        self.failures.append((generation, cause))


def transitions(worker: Any, failing: int = 0) -> tuple[GroupTransitions, Controller, list[int]]:
    """With an exchange that fails so many times."""
    controller, entered = Controller(), list[int]()

    def enter(plan: GenerationSpec, communicator: Any) -> int:
        entered.append(plan.generation)
        if len(entered) <= failing:
            raise CommunicationFailedError("broke")
        return 5

    made = GroupTransitions(
        worker,
        controller,  # type: ignore[arg-type]
        enter,
        lambda moment: None,
        before_change=lambda stays: None,
        regroup_timeout_s=1.0,
    )
    return made, controller, entered


def test_a_member_tells_of_each_group_that_breaks_until_one_stands() -> None:
    ways, controller, entered = transitions(Worker((SPEC, Peers()), (SPEC, Peers())), failing=1)
    assert ways.regroup("first", 1) == 5
    assert entered == [2, 2] and controller.failures == [(1, "first"), (1, "broke")]


@pytest.mark.parametrize("holds", [True, False])
def test_a_joiner_tells_of_a_failure_only_what_it_would_take_with_it(holds: bool) -> None:
    ways, controller, _ = transitions(Worker((SPEC, Peers()), (SPEC, Peers())), failing=1)
    ways.join(lambda: holds, timeout_s=1.0)
    assert controller.failures == ([(1, "broke")] if holds else [])


def test_a_switch_waits_for_a_place_that_suits_its_size() -> None:
    ways, _, entered = transitions(Worker((SPEC, Peers())))
    ways.switch(2, lambda size: size < 2)
    assert entered == []
    ways.switch(2, lambda size: size == 2)
    assert entered == [2]


def test_a_group_that_was_called_off_after_it_was_agreed_on_is_replaced() -> None:
    ways, controller, entered = transitions(Worker(None, (SPEC, Peers())))
    ways.switch(2, lambda size: True)
    assert entered == [2] and "called off" in controller.failures[0][1]


def test_who_is_no_member_any_more_is_dismissed_and_so_is_everyone_when_the_job_stops() -> None:
    with pytest.raises(WorkerDismissed) as left:
        transitions(Worker((SPEC, None)))[0].regroup("x", 1)
    assert not left.value.stopped
    stopping = Worker(None, None)
    with pytest.raises(LostGroupError):
        transitions(stopping)[0].regroup("x", 1)
    stopping.stop_requested = True
    with pytest.raises(WorkerDismissed) as stopped:
        transitions(stopping)[0].regroup("x", 1)
    assert stopped.value.stopped


class Parts:
    """What a group's entry goes through, in order."""

    buffer_layout, marker, samples, shape, least_share = 7, 0, 48, BatchChoice(atomic_bsz=4), 1

    def __init__(self) -> None:
        self.done: list[Any] = []

    def exchange(self, communicator: Any, replicas: Any, samples: int | None) -> Exchanged:
        assert samples == self.samples
        self.done.append("exchange")
        return Exchanged(received=True, passes=3)

    def reconcile(self, communicator: Any, marker: int, *, holds: bool) -> None: ...

    def enter_group(self) -> None:
        self.done.append("enter")

    def agree_on(self, what: Announced) -> None:
        self.done.append(what.intent)

    def ask_for_shares(self, least: int) -> None:
        self.done.append(("shares", least))

    def sync_buffers(self, communicator: Any) -> None:
        self.done.append("buffers")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_group_is_entered_by_state_then_buffers_then_shape(world_size: int) -> None:
    parts, peers = Parts(), Peers()
    peers.world_size = world_size
    entry = GroupEntry(
        parts,
        parts,
        parts,
        catch_up=lambda communicator: parts.done.append("collectives"),
        begin=lambda: Pause(state_s=1.5),
        set_shape=lambda shape: parts.done.append(shape),
        switched=lambda generation, pause: parts.done.append((generation, pause.pause_s)),
        moment=lambda name: None,
    )
    assert entry(SPEC, peers) == 3  # type: ignore[arg-type]
    announced = [Intent.BUFFERS, ("shares", 2)] if world_size > 1 else []  # another rank has BatchNorm in training
    assert parts.done == ["exchange", "enter", "enter", *announced, "buffers", "collectives", Parts.shape, (2, 1.5)]


def test_a_worker_stands_where_it_is_expected_to_until_its_first_group() -> None:
    worker = Worker()
    group = Group("b", worker, RankInfo(rank=1, world_size=3))  # type: ignore[arg-type]
    assert group.rank_info == RankInfo(rank=1, world_size=3) and group.world_size == 1
    worker.current = SPEC  # type: ignore[assignment]
    assert group.rank_info.world_size == 2 and group.rank_info.rank == 1
    worker.communicator = None  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="not entered a generation"):
        _ = group.communicator


class Loader:
    def join(self, session: Any) -> None:
        self.session = session


def test_the_registry_calls_hooks_in_order_and_holds_no_loader() -> None:
    registry, called, loader = Registry(), list[int](), Loader()
    registry.add_hook(HookPoint.BETWEEN_STEPS, lambda: called.append(1))
    registry.add_hook(HookPoint.BEFORE_END, lambda: called.append(2))
    registry.add_hook(HookPoint.BETWEEN_STEPS, lambda: called.append(3))
    registry.call(HookPoint.BETWEEN_STEPS)
    assert called == [1, 3]
    registry.loaders.lead(loader, LoaderInfo(limits=BatchLimits(init_batch_size=8)))
    assert registry.loaders.leads(loader) and not registry.loaders.leads(Loader())
    del loader
    gc.collect()
    assert registry.loaders.leading is not None and registry.loaders.leading() is None


def test_the_first_model_stands_for_the_gain_of_a_step() -> None:
    models = Registry().models
    assert models.noise() is None and models.gain(1.0) == 1.0
    assert models.add(ModelInfo(kind="A", details=""), lambda: NoiseScale(sqr=1.0, var=3.0)) == 0
    assert models.add(ModelInfo(kind="B", details=""), lambda: None) == 1
    assert models.gain(3.0) == pytest.approx((3.0 + 1.0) / (3.0 / 3.0 + 1.0))


class NoCheck:
    def begin(self) -> None: ...

    def due(self, steps: int, *, at_end: bool = False) -> bool:
        return False


def test_one_rank_agrees_with_itself_and_takes_each_wish_once() -> None:
    worker = Worker()
    worker.wanted_batch, worker.prepared_ahead = BatchChoice(atomic_bsz=3, accum_steps=1), 2
    agreed = AgreedChanges(worker)
    ledger = StepLedger(SharedState(RunProgress()), recoverable=False)
    consensus = RankConsensus(Peers, lambda: 1, agreed, NoCheck(), ledger)  # type: ignore[arg-type]
    ballot = consensus.vote(Announced(Intent.EDGE, 1), {(0, 0): {"b": 1.0, "a": 2.0}})
    assert ballot == [((0, 0), "a", 2.0), ((0, 0), "b", 1.0)]
    assert agreed.take_generation() == 3 and agreed.take_generation() == 0
    assert agreed.take_batch() == worker.wanted_batch and agreed.take_batch() is None
