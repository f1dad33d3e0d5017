"""What ranks agree on: what rides on sums, comparisons that are due, names, and the end; in threads over real gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import Communicator
from elastic_ray.consensus.agreed_changes import CONTROL_SIZE, AgreedChanges, with_names_of_first_rank
from elastic_ray.consensus.announcer import Announcer
from elastic_ray.consensus.consensus import RankConsensus
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.consensus.saving import Readiness, SaveAgreement, Saving
from elastic_ray.membership.messages import GenerationSpec, Member, RankInfo
from elastic_ray.run.group import Group
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.replicas import Replicas
from elastic_ray.state.shared_state import SharedState
from elastic_ray.steps.ledger import StepLedger
from tests.membership.groups import on_ranks


class Membership:
    """A worker's side of the membership protocol, as far as a group is seen from it."""

    stop_requested, preempting, prepared_ahead, voided, generation = False, False, 0, False, 1
    wanted_batch: BatchChoice | None = None

    def __init__(self, communicator: Communicator) -> None:
        members = tuple(Member(worker=f"w{rank + 1}", node="n1") for rank in range(communicator.world_size))
        self.worker, self.communicator = f"w{communicator.rank + 1}", communicator
        self.current = GenerationSpec(generation=1, members=members)


class Part:
    """Rides on the control sums with its rank and a one."""

    def __init__(self) -> None:
        self.heard: list[tuple[list[float], int]] = []

    def begin(self) -> None: ...

    def size(self, world_size: int) -> int:
        return 2

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        return [float(rank), 1.0]

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        self.heard.append((list(sums), world_size))


class Rank:
    """One rank's consensus with a model and two parts that ride along."""

    def __init__(self, communicator: Communicator, steps: int = 3) -> None:
        model = nn.Linear(2, 1)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        self.replicas, self.parts = Replicas(), [Part(), Part()]
        self.replicas.add(model, torch.optim.SGD(model.parameters(), lr=0.1))
        membership: Any = Membership(communicator)
        group = Group(membership.worker, membership, RankInfo())
        group.follow()
        ledger = StepLedger(SharedState(RunProgress(steps=steps)))
        self.agreed = AgreedChanges(membership)
        self.consensus = RankConsensus(group, self.agreed, self.replicas, ledger, self.parts)
        self.consensus.follow_group()


def test_what_rides_on_the_control_sums_comes_to_its_part_once() -> None:
    def work(communicator: Communicator) -> Any:
        one = Rank(communicator)
        values = one.consensus.control_values(communicator.rank)
        assert len(values) == one.consensus.control_size == CONTROL_SIZE + 4
        sums = torch.tensor(values)
        communicator.wait(communicator.all_reduce(sums))
        one.consensus.conclude(sums.tolist(), communicator.world_size)
        one.consensus.vote(Announced(Intent.EDGE, 1), {})
        return [part.heard for part in one.parts]

    for heard in on_ranks(2, work):
        assert heard == [[([1.0, 2.0], 2)] * 2] * 2
    (alone,) = on_ranks(1, lambda communicator: _voted_alone(communicator))
    assert alone == [[([0.0, 1.0], 1)]] * 2


def _voted_alone(communicator: Communicator) -> Any:
    one = Rank(communicator)
    one.consensus.vote(Announced(Intent.EDGE, 1), {})
    return [part.heard for part in one.parts]


@pytest.mark.parametrize(("steps", "compares"), [(3, False), (10, True), (200, True)])
def test_reductions_are_announced_where_parameters_are_to_be_compared(steps: int, compares: bool) -> None:
    def work(communicator: Communicator) -> tuple[bool, int]:
        one = Rank(communicator, steps)
        asks = one.consensus.announce_reductions(Announced(Intent.GRADIENTS), known=True)
        if asks:
            one.consensus.agreed()
        one.consensus.reductions_started()
        return asks, len(set(one.consensus.announcer.fingerprints) - {0})

    assert on_ranks(2, work) == [(compares, int(compares))] * 2


def test_ranks_that_have_ended_hear_the_fingerprints_of_all() -> None:
    def work(communicator: Communicator) -> Any:
        speaker = Announcer(communicator)
        ended = speaker.announce_finished(Announced(Intent.FINISH), 7, 20.0, fingerprint=5 + communicator.rank)
        return ended, speaker.fingerprints

    assert on_ranks(2, work) == [(True, [5, 6])] * 2


def test_a_rank_without_samples_adds_nothing_to_the_names_of_the_first() -> None:
    added = [{(0, 0): {"loss": 2.0}, (0, 1): {"hits": 1.0}}, {(0, 0): {"own": 3.0}}]
    found = on_ranks(2, lambda communicator: with_names_of_first_rank(communicator, added[communicator.rank]))
    assert found == [added[0], {(0, 0): {"own": 3.0, "loss": 0.0}, (0, 1): {"hits": 0.0}}]


class Writer:
    """Can write its part."""

    def readiness(self, rank: int, world_size: int, *, now: bool) -> Readiness:
        return Readiness.READY

    def standing(self) -> Readiness:
        return Readiness.READY

    def begin(self) -> None: ...


@pytest.mark.parametrize(
    ("divided", "world", "outcome"), [(True, 2, Saving.TOGETHER), (False, 2, Saving.ALONE), (True, 1, Saving.ALONE)]
)
def test_ranks_save_together_what_is_divided_among_several(divided: bool, world: int, outcome: Saving) -> None:
    ranks = [SaveAgreement() for _ in range(world)]
    for each in ranks:
        each.serve(Writer())
    ballots = [each.ballot(number, world, divided=divided, now=True) for number, each in enumerate(ranks)]
    sums = [sum(each) for each in zip(*ballots, strict=True)]
    assert {each.decide(sums, number, world, now=True) for number, each in enumerate(ranks)} == {outcome}
