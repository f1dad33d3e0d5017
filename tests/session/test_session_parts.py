"""The parts of a session, each alone between fakes of a few lines."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.reports import LoaderInfo, ModelInfo
from elastic_ray.consensus.agreed_changes import AgreedChanges
from elastic_ray.consensus.consensus import RankConsensus
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.membership.messages import GenerationSpec, Member, RankInfo
from elastic_ray.run.group import Group
from elastic_ray.run.registry import HookPoint, Registry
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.shared_state import SharedState
from elastic_ray.steps.ledger import StepLedger
from placement.goodput.model import NoiseScale

SPEC = GenerationSpec(generation=2, members=(Member(worker="a", node="n1"), Member(worker="b", node="n1")))


class Peers:
    """A communicator of which only the sizes matter."""

    rank, world_size = 0, 1


class Worker:
    """A worker's side of the membership protocol."""

    worker, stop_requested, preempting, prepared_ahead, voided = "a", False, False, 0, False
    wanted_batch: BatchChoice | None = None

    def __init__(self) -> None:
        self.generation, self.current, self.communicator = 1, None, Peers()


def test_a_worker_stands_where_it_is_expected_to_until_its_first_group() -> None:
    worker = Worker()
    group = Group("b", worker, RankInfo(rank=1, world_size=3))
    assert group.rank_info == RankInfo(rank=1, world_size=3) and group.world_size == 1
    with pytest.raises(RuntimeError, match="not entered a generation"):
        _ = group.communicator.rank
    worker.current = SPEC
    group.follow()
    assert group.rank_info.world_size == 2 and group.rank_info.rank == 1


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
    ledger = StepLedger(SharedState(RunProgress()))
    worker.current = SPEC
    group = Group("a", worker, RankInfo())
    group.follow()
    consensus = RankConsensus(group, agreed, NoCheck(), ledger)
    ballot = consensus.vote(Announced(Intent.EDGE, 1), {(0, 0): {"b": 1.0, "a": 2.0}})
    assert ballot == [((0, 0), "a", 2.0), ((0, 0), "b", 1.0)]
    assert agreed.take_generation() == 3 and agreed.take_generation() == 0
    assert agreed.take_batch() == worker.wanted_batch and agreed.take_batch() is None
