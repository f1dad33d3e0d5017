"""What a run has registered, and the order in which moments and hooks come, where that matters."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.batch.limits import BatchLimits
from elastic_ray.batch.reports import LoaderInfo, ModelInfo
from elastic_ray.communication.communicator import Communicator
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.membership.messages import GenerationSpec, Member, RankInfo
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.run.current import WorkerDismissed, set_session
from elastic_ray.run.registry import HookPoint, ModelFacts, Registry
from elastic_ray.run.run import Group
from elastic_ray.session.group_changes import CollectiveResults, GroupChanges
from elastic_ray.session.session import Session
from elastic_ray.sync.checks import StrategyError
from placement.goodput.model import NoiseScale
from tests.loop.alone import session_of

_WAIT_S = 20.0


class Loader:
    def join(self, session: Any) -> None:
        self.session = session


def test_hooks_are_called_in_order_and_hold_no_loader() -> None:
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


def test_the_first_model_stands_for_a_step_s_gain() -> None:
    models = Registry().models
    assert models.noise() is None and models.gain(1.0) == 1.0
    assert models.add(ModelInfo(kind="A", details=""), ModelFacts(noise=lambda: NoiseScale(sqr=1.0, var=3.0))) == 0
    assert models.add(ModelInfo(kind="B", details=""), ModelFacts(noise=lambda: None)) == 1
    assert models.gain(3.0) == pytest.approx((3.0 + 1.0) / (3.0 / 3.0 + 1.0))


def test_a_worker_stands_where_expected_until_its_group() -> None:
    def form(plan: Any, rank: int) -> Communicator:
        return Communicator(
            None, "b", rank=rank, world_size=1, host="127.0.0.1", timeout_s=_WAIT_S, form_timeout_s=_WAIT_S
        )

    membership = WorkerMembership("b", form, lambda generation, cause: None)
    group = Group("b", membership, RankInfo(rank=1, world_size=3))
    assert group.rank_info == RankInfo(rank=1, world_size=3) and group.world_size == 1
    with pytest.raises(RuntimeError, match="not entered a generation"):
        _ = group.communicator.rank
    membership.post(GenerationSpec(generation=2, members=(Member(worker="b", node="n1"),)))
    membership.await_next(timeout_s=_WAIT_S)
    group.adapt()
    assert group.rank_info == RankInfo(rank=0, world_size=1) and group.generation == 2


# -- the order, as the module's text gives it ----------------------------------------------------------------------


class Model:
    """A model that notes when the run comes to it; where one notes a property, it is read there alone."""

    local = is_open = drifts = on = gives_statistics = divided = tabled = False
    settled, scaler, strategy_name, strategy_key = True, None, "noted", "noted"

    def __init__(self, session: Session, note: Callable[[str], None]) -> None:
        self._session, self._note, self.drift = session, note, self

    @property
    def marker(self) -> int:
        """Read where ranks exchange state."""
        self._note("exchange")
        return 0

    def collapse(self, *, gather: bool = True, alike: bool = False) -> None:
        self._note("collapse")

    def prepare_to_save(self) -> None:
        self._note("prepare to save")

    def before_change(self, stays: Any) -> None:
        self._note(f"before change of group {self._session.group.generation}")

    def enter_group(self) -> None:
        self._note("enter group")


class Noted:
    """A session alone in its job, in which everything that can be registered notes its turn, by generation."""

    def __init__(self) -> None:
        self.session: Session = session_of()
        self.log: list[str] = []
        registry: Any = self.session.registry
        registry.gradients.append(Model(self.session, self.log.append))
        registry.buffers.append(self)
        self.session.consensus.add(self)
        for point in HookPoint:
            registry.add_hook(point, lambda point=point: self.log.append(point.name))
        self.session.start_epochs(1)

    layout = ()
    resting: None = None

    def __call__(self, communicator: Communicator) -> None:
        self.log.append(f"buffers of group {self.session.group.generation}")

    def start(self) -> None:
        self.log.append("consensus enters")

    def size(self, world_size: int) -> int:
        return 0

    def announce(self, generation: int) -> None:
        """Have the next group of this worker ready."""
        membership = self.session.membership
        membership.post(GenerationSpec(generation=generation, members=(Member(worker="0", node="n1"),)))
        until_s = time.monotonic() + _WAIT_S
        while membership.prepared_spec(generation) is None:
            assert time.monotonic() < until_s, "the group did not form"
            time.sleep(0.01)  # it forms in a thread of the membership

    def between_steps(self) -> list[str]:
        """What comes between two steps, after a vote on what this rank wants, in order."""
        session = self.session
        session.consensus.vote(Announced(Intent.EDGE, 1), {})
        self.log.clear()
        changes = GroupChanges(
            session.run, session.adaptation, CollectiveResults(), explain=str, regroup_timeout_s=_WAIT_S
        )
        changes.between_steps(lambda world_size: True)
        return self.log


ENTERED = ["exchange", "enter group", "consensus enters", "buffers of group 1", "SHAPE_CHANGED"]


def test_a_run_is_checked_before_its_first_group() -> None:
    assert Noted().log == [HookPoint.BEFORE_FIRST_EPOCH.name, *ENTERED]


def test_models_are_made_one_and_saved_before_a_change() -> None:
    noted = Noted()
    noted.announce(2)
    noted.session.run.agreed.wants_consensus = True
    saved = ["collapse", "buffers of group 1", "prepare to save", HookPoint.BETWEEN_STEPS.name]
    entered = [each.replace("group 1", "group 2") for each in ENTERED]
    assert noted.between_steps() == [*saved, "before change of group 1", *entered]


def test_the_preempted_leave_one_model_and_do_nothing_else() -> None:
    noted = Noted()
    noted.announce(2)
    noted.session.run.agreed.preempted = True  # as a vote would have it
    with pytest.raises(WorkerDismissed):
        noted.between_steps()
    assert noted.log == ["collapse", "buffers of group 1", "prepare to save"]


def test_hooks_of_end_come_before_the_end_is_told() -> None:
    noted = Noted()
    noted.log.clear()
    policies: Any = noted.session.adaptation
    policies.end_train = lambda: noted.log.append("policies end")
    noted.session.finish()
    assert noted.log == [HookPoint.BEFORE_END.name, "policies end"]


def test_hooks_before_the_first_epoch_tell_their_loader() -> None:
    session, told = session_of(), list[LoaderInfo | None]()
    controller: Any = session.controller
    ready = controller.ready
    controller.ready = lambda info, **more: (told.append(info), ready(info, **more))
    info, loader = LoaderInfo(limits=BatchLimits(init_batch_size=8)), Loader()
    session.registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, lambda: session.registry.loaders.lead(loader, info))
    session.start_epochs(1)
    assert told == [dataclasses.replace(info, models=())]


def test_model_that_a_hook_wraps_is_checked_with_it() -> None:
    """It registers its own checks while the hooks are called: they come after the one that wraps it."""
    registry, called = Registry(), list[str]()

    def wrap() -> None:
        called.append("wrap")
        registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, lambda: called.append("check"))

    registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, wrap)
    registry.add_hook(HookPoint.BEFORE_FIRST_EPOCH, lambda: called.append("another"))
    registry.call(HookPoint.BEFORE_FIRST_EPOCH)
    assert called == ["wrap", "another", "check"]


def test_an_earlier_run_s_loader_joins_before_models_look() -> None:
    """Else the second run would take up an adaptive batch that its model cannot serve."""
    set_session(None)
    rows = torch.utils.data.TensorDataset(torch.arange(12.0))
    loader = er.AdaptiveDataLoader(rows, batch_size=6)
    for strategy in ("all_reduce", "diloco"):
        model = torch.nn.Linear(1, 1)
        wrapped = er.AdaptiveDataParallel(
            model, optimizer := torch.optim.SGD(model.parameters(), lr=1e-4), strategy=strategy, scaling_rule="none"
        )
        if strategy == "all_reduce":
            loader.autoscale_batch_size(12)
            for _ in er.remaining_epochs_until(1):
                for (x,) in loader:
                    optimizer.zero_grad()
                    wrapped(x[:, None]).square().mean().backward()
                    optimizer.step()
        else:
            with pytest.raises(StrategyError, match="an adaptive batch"):
                list(er.remaining_epochs_until(1))
    set_session(None)
