"""What ranks agree on: what rides on sums, comparisons that are due, names, and the end; in threads over real gloo."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.consensus.announcer import PAYLOAD_SIZE, Announcer
from elastic_ray.consensus.consensus import CONTROL_SIZE, AgreedChanges, RankConsensus, with_names_of_first_rank
from elastic_ray.consensus.intents import Announced, Intent, RanksDisagreeError
from elastic_ray.consensus.saving import Readiness, SaveAgreement, Saving
from elastic_ray.membership.messages import GenerationSpec, Member, RankInfo
from elastic_ray.run.run import Group
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.replicas import Replicas
from elastic_ray.state.shared_state import SharedState
from elastic_ray.steps.ledger import StepLedger
from tests.membership.groups import on_ranks


class Membership:
    """A worker's side of the membership protocol, as far as a group is seen from it."""

    stop_requested, preempting, prepared_ahead, voided, generation, critical_batch = False, False, 0, False, 1, 0
    wanted_batch: BatchChoice | None = None

    def __init__(self, communicator: Communicator) -> None:
        members = tuple(Member(worker=f"w{rank + 1}", node="n1") for rank in range(communicator.world_size))
        self.worker, self.communicator = f"w{communicator.rank + 1}", communicator
        self.current = GenerationSpec(generation=1, members=members)


class Part:
    """Rides on the control sums with its rank and a one."""

    def __init__(self) -> None:
        self.heard: list[tuple[list[float], int]] = []
        self.resting: Sequence[float] | None = None

    def start(self) -> None: ...

    def size(self, world_size: int) -> int:
        return 2

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        return [float(rank), 1.0]

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        self.heard.append((list(sums), world_size))


class Rank:
    """One rank's consensus with a model and two parts that ride along."""

    def __init__(self, communicator: Communicator, steps: int = 3, *, last_epoch: bool = False) -> None:
        model = nn.Linear(2, 1)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        self.replicas, self.parts = Replicas(), [Part(), Part()]
        self.replicas.add(model, torch.optim.SGD(model.parameters(), lr=0.1))
        membership: Any = Membership(communicator)
        group = Group(membership.worker, membership, RankInfo())
        group.adapt()
        ledger = StepLedger(SharedState(RunProgress(steps=steps)))
        self.agreed = AgreedChanges(membership)
        self.warnings = list[str]()
        self.consensus = RankConsensus(
            group, self.agreed, self.replicas, ledger, self.parts, self.warnings.append, lambda: last_epoch
        )
        self.consensus.set_group()


def test_what_rides_on_control_sums_reaches_its_part_once() -> None:
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


def test_resting_part_is_counted_but_not_asked_nor_told() -> None:
    def work(communicator: Communicator) -> Any:
        one = Rank(communicator)
        if communicator.rank:
            one.parts[0].resting = (0.0, 5.0)
        one.consensus.vote(Announced(Intent.EDGE, 1), {})
        return [part.heard for part in one.parts]

    asked, rests = on_ranks(2, work)
    assert asked == [[([0.0, 6.0], 2)], [([1.0, 2.0], 2)]] and rests == [[], [([1.0, 2.0], 2)]]


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
        one.consensus.announcer.done()
        return asks, len(set(one.consensus.announcer.fingerprints) - {0})

    assert on_ranks(2, work) == [(compares, int(compares))] * 2


def test_ranks_that_have_ended_hear_the_fingerprints_of_all() -> None:
    def work(communicator: Communicator) -> Any:
        speaker = Announcer(communicator)
        ended = speaker.announce_finished(Announced(Intent.FINISH), 7, 20.0, fingerprint=5 + communicator.rank)
        return ended, speaker.fingerprints

    assert on_ranks(2, work) == [(True, [5, 6])] * 2


def test_rank_without_samples_adds_0_to_the_firsts_names() -> None:
    added = [{(0, 0): {"loss": 2.0}, (0, 1): {"hits": 1.0}}, {(0, 0): {"own": 3.0}}]
    found = on_ranks(2, lambda communicator: with_names_of_first_rank(communicator, added[communicator.rank]))
    assert found == [added[0], {(0, 0): {"own": 3.0, "loss": 0.0}, (0, 1): {"hits": 0.0}}]


class Writer:
    """Can write its part."""

    def readiness(self, rank: int, world_size: int, *, now: bool) -> Readiness:
        return Readiness.READY

    def standing(self) -> Readiness:
        return Readiness.READY

    def start(self) -> None: ...


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


class Wishes:
    """What the controller wants of a rank, as the control values read it."""

    generation, prepared_ahead, stop_requested, preempting, critical_batch = 5, 0, False, False, 0
    wanted_batch: BatchChoice | None = None


def _agreed(**wishes: Any) -> AgreedChanges:
    made: Any = Wishes()
    for name, value in wishes.items():
        setattr(made, name, value)
    return AgreedChanges(made)


def _summed(*ranks: AgreedChanges) -> list[float]:
    sums = [sum(each) for each in zip(*(rank.values(number) for number, rank in enumerate(ranks)), strict=True)]
    for rank in ranks:
        rank.conclude(sums, len(ranks))
    return sums


def test_ranks_without_a_wish_agree_on_nothing() -> None:
    ranks = [_agreed() for _ in range(3)]
    assert _summed(*ranks) == [0.0] * CONTROL_SIZE
    for each in ranks:
        assert (each.generation, each.stop, each.preempted, each.batch) == (0, False, False, None)
        assert not each.comparison and not each.saves and not each.pop_consensus()


@pytest.mark.parametrize(("ahead", "agreed"), [((2, 2, 2), 7), ((1, 2, 1), 0), ((0, 2, 2), 0), ((1, 1, 1), 6)])
def test_a_generation_is_agreed_on_once_all_prepared_it(ahead: tuple[int, ...], agreed: int) -> None:
    ranks = [_agreed(prepared_ahead=each) for each in ahead]
    sums = _summed(*ranks)
    assert sums[:2] == [sum(ahead), sum(each * each for each in ahead)]
    assert [each.pop_generation() for each in ranks] == [agreed] * 3
    assert [each.pop_generation() for each in ranks] == [0] * 3, "once"


@pytest.mark.parametrize("world", [3, 8000])
def test_generations_are_agreed_on_after_many_cancelled_ones(world: int) -> None:
    """The sums travel in float32."""
    one, other = _agreed(prepared_ahead=5003), _agreed(prepared_ahead=5004)
    for second, agreed in ((one, 5008), (other, 0)):
        sums = torch.tensor([one.values(0)] * (world - 1) + [second.values(1)], dtype=torch.float32).sum(0)
        one.conclude(sums.tolist(), world)
        assert one.pop_generation() == agreed


def test_one_rank_suffices_to_stop_or_preempt_for_good() -> None:
    for wish, told in (("stop_requested", (True, False)), ("preempting", (False, True))):
        ranks = [_agreed(), _agreed(**{wish: True})]
        _summed(*ranks)
        assert {(each.stop, each.preempted) for each in ranks} == {told}
        ranks[0].conclude([0.0] * CONTROL_SIZE, 2)
        assert (ranks[0].stop, ranks[0].preempted) == told


@pytest.mark.parametrize("accum_steps", [0, 2])
def test_the_batch_is_the_first_ranks_wish_alone(accum_steps: int) -> None:
    wish = BatchChoice(atomic_bsz=8, accum_steps=accum_steps)
    ranks = [_agreed(wanted_batch=wish), _agreed(wanted_batch=BatchChoice(atomic_bsz=3))]
    _summed(*ranks)
    assert [each.pop_batch() for each in ranks] == [wish, wish] and ranks[0].pop_batch() is None
    ranks = [_agreed(), _agreed(wanted_batch=wish)]
    _summed(*ranks)
    assert [each.batch for each in ranks] == [None, None]


def test_first_rank_asks_for_consensus_and_comparison_once_each() -> None:
    ranks = [_agreed(), _agreed()]
    ranks[0].wants_consensus = True
    _summed(*ranks)
    assert [each.pop_consensus() for each in ranks] == [True, True]
    assert not ranks[0].pop_consensus() and not ranks[0].comparison and not ranks[0].saves
    ranks[0].wants_comparison = True
    _summed(*ranks)
    assert [(each.comparison, each.saves, each.pop_consensus()) for each in ranks] == [(True, True, False)] * 2
    ranks[0].comparison = False
    _summed(*ranks)
    assert not ranks[0].comparison and ranks[1].comparison, "each rank notes its own"
    assert _summed(*ranks)[7] == 0.0
    ranks[1].wants_consensus = True
    assert _summed(*ranks)[7] == 0.0, "only the first rank's wish counts"
    ranks[1].generation, ranks[1].batch = 4, BatchChoice(atomic_bsz=1)
    ranks[1].start()
    assert not ranks[1].comparison and not ranks[1].saves and (ranks[1].generation, ranks[1].batch) == (0, None)


def test_reports_are_the_first_rank_s_and_never_fewer() -> None:
    ranks = [_agreed(), _agreed()]
    ranks[0].reports = 3
    ranks[1].reports = 9
    assert _summed(*ranks)[6] == 3.0
    assert [each.reports for each in ranks] == [3, 9]
    ranks[0].reports = 0
    _summed(*ranks)
    assert [each.reports for each in ranks] == [3, 9]


@pytest.mark.parametrize("first_reports", [False, True])
def test_third_report_elsewhere_is_noticed_unless_the_first_reports(first_reports: bool) -> None:
    ranks = [_agreed(), _agreed()]
    ranks[0].reports = int(first_reports)
    _summed(*ranks)
    assert [ranks[1].is_unrecorded() for _ in range(4)] == [False, False, not first_reports, False]


@pytest.mark.parametrize("count", [0, 1, 19, 20, 21, 50])
def test_any_number_of_sums_adds_up_in_one_order(count: int) -> None:
    def work(communicator: Communicator) -> Any:
        names = [f"n{each:02}" for each in range(count)]
        if communicator.rank:
            names.reverse()  # ranks may add in different orders
        added = {(0, 0): {name: 1.0 + int(name[1:]) for name in names}}
        one = Rank(communicator)
        return one.consensus.vote(Announced(Intent.EDGE, 1), added)

    expected = [((0, 0), f"n{each:02}", 2.0 * (1 + each)) for each in range(count)]
    assert on_ranks(2, work) == [expected, expected]
    assert on_ranks(1, work) == [[(key, name, value / 2) for key, name, value in expected]]


def test_ranks_that_add_to_other_names_are_told_theirs() -> None:
    def work(communicator: Communicator) -> Any:
        added = {(0, 0): {"loss": 1.0} if communicator.rank else {}}
        return Rank(communicator).consensus.vote(Announced(Intent.EDGE, 1), added)

    first, second = on_ranks(2, work)
    assert isinstance(first, RuntimeError) and str(first).endswith("this rank has added to none")
    assert isinstance(second, RuntimeError) and str(second).endswith("this rank has added to ['loss']")


def test_votes_within_a_step_carry_no_parts() -> None:
    def work(communicator: Communicator) -> Any:
        one = Rank(communicator)
        one.consensus.vote(Announced(Intent.EDGE, 2), {})  # of a loader within a step
        one.consensus.vote(Announced(Intent.END_OF_PASS, 1), {})
        return [part.heard for part in one.parts]

    assert on_ranks(2, work) == [[[], []]] * 2
    assert on_ranks(1, work) == [[[], []]]


@pytest.mark.parametrize(
    ("what", "asked", "last_epoch", "compares"),
    [
        (Announced(Intent.END_OF_PASS), False, False, False),
        (Announced(Intent.END_OF_PASS), True, False, True),
        (Announced(Intent.END_OF_PASS), False, True, True),
        (Announced(Intent.END_OF_PASS, 1), True, True, False),  # within a step
        (Announced(Intent.BUFFERS), False, False, True),
        (Announced(Intent.BUFFERS, 1), True, True, False),
        (Announced(Intent.GRADIENTS), True, False, True),
        (Announced(Intent.GRADIENTS, 1), True, False, True),
        (Announced(Intent.GRADIENTS), False, True, False),
        (Announced(Intent.EDGE), True, True, False),
    ],
)
def test_parameters_are_compared_where_code_may_have_changed_them(
    what: Announced, asked: bool, last_epoch: bool, compares: bool
) -> None:
    def work(communicator: Communicator) -> Any:
        one = Rank(communicator, 14, last_epoch=last_epoch)
        one.replicas.fingerprint(13)  # a step ago, so that none is due by the count of steps
        one.agreed.comparison = asked
        one.consensus.agree_on(what)
        return [value > 0 for value in one.consensus.announcer.fingerprints], one.agreed.comparison

    assert on_ranks(2, work) == [([compares] * 2, asked and not compares)] * 2


def test_only_a_passs_end_notes_what_it_has_left() -> None:
    def work(communicator: Communicator) -> Any:
        held = []
        for what in (Announced(Intent.GRADIENTS), Announced(Intent.END_OF_PASS, 1), Announced(Intent.END_OF_PASS)):
            one = Rank(communicator, 14)
            one.replicas.fingerprint(13)
            one.consensus.agree_on(what)
            one.replicas.leave(14, 3)
            held.append(one.replicas.left_at(3) > 0)
        return held

    assert on_ranks(2, work) == [[False, False, True]] * 2


def test_samples_that_ranks_read_differently_are_warned_of_once() -> None:
    def work(communicator: Communicator) -> Any:
        one = Rank(communicator)
        one.consensus.agree_on(Announced(Intent.GRADIENTS))
        equal = [sum(each) for each in zip(*[one.consensus.step_tag()] * 2, strict=True)]
        one.consensus.check_same_step(equal)
        silent = list(one.warnings)
        tags = torch.tensor(Announcer.step_tag(0, 5 + communicator.rank))
        communicator.wait(communicator.all_reduce(tags))
        one.consensus.check_same_step(tags.tolist())
        return silent, len(one.warnings), one.consensus.step_tag(), one.consensus.step_tag(1)

    assert on_ranks(2, work) == [([], 1, (0.0, 0.0), (1.0, 1.0))] * 2


def test_a_steps_tag_counts_steps_samples_notes_to_64() -> None:
    assert Announcer.step_tag(3, 4) == (7.0, 49.0)
    assert Announcer.step_tag(60, 4) == (0.0, 0.0)
    assert Announcer.step_tag(60, 3) == (63.0, 3969.0)


def test_gradients_of_other_steps_are_told() -> None:
    def work(communicator: Communicator) -> Any:
        speaker = Announcer(communicator)
        speaker.start_quietly(Announced(Intent.GRADIENTS), 3 + communicator.rank)
        tags = torch.tensor(Announcer.step_tag(3 + communicator.rank))
        communicator.wait(communicator.all_reduce(tags))
        return speaker.check_same_step(tags.tolist(), note=0)

    for told in on_ranks(2, work):
        assert isinstance(told, RanksDisagreeError) and "after 3 steps; rank 1" in str(told)
        assert "rank 0 reduces the gradients of model 0" in str(told)


def test_what_rides_along_comes_back_summed_and_leaves_nothing() -> None:
    def work(communicator: Communicator) -> Any:
        speaker = Announcer(communicator, room=5)
        found = []
        for payload in ([1.0, 2.0, 3.0, 4.0, 5.0 + communicator.rank], [7.0], ()):
            speaker.start(Announced(Intent.EDGE), 1, fingerprint=communicator.rank, payload=payload)
            found.append((speaker.agree(), speaker.fingerprints))
            speaker.done()
        return found

    sums = [[2.0, 4.0, 6.0, 8.0, 11.0], [14.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 5]
    assert on_ranks(2, work) == [[(each, [0, 1]) for each in sums]] * 2
    assert on_ranks(2, lambda communicator: len(_at_an_edge(Announcer(communicator)))) == [PAYLOAD_SIZE] * 2


def _at_an_edge(speaker: Announcer) -> list[float]:
    speaker.start(Announced(Intent.EDGE), 1)
    return speaker.agree()


def test_strategies_are_told_only_where_all_ranks_reduce_gradients() -> None:
    def work(communicator: Communicator, third: Intent) -> Any:
        own = Announced(Intent.GRADIENTS, 0, communicator.rank, f"s{communicator.rank}")
        speaker = Announcer(communicator)
        speaker.start(Announced(third, 0, 5) if communicator.rank == 2 else own, 1)
        return speaker.agree()

    for told in on_ranks(3, lambda communicator: work(communicator, Intent.GRADIENTS)):
        assert isinstance(told, RanksDisagreeError) and "under strategy 's0'" in str(told) and "'s1'" in str(told)
    for told in on_ranks(3, lambda communicator: work(communicator, Intent.END_OF_PASS)):
        assert isinstance(told, RanksDisagreeError) and "under strategy" not in str(told)


def test_refusal_is_repeated_also_of_what_was_not_completed() -> None:
    def work(communicator: Communicator) -> Any:
        speaker = Announcer(communicator)
        speaker.start_quietly(Announced(Intent.GRADIENTS), 1)
        told = []
        for _ in range(2):
            with pytest.raises(RanksDisagreeError) as refused:
                speaker.start(Announced(Intent.EDGE), 1)
            told.append(str(refused.value))
        return told[0] == told[1] and "which was not completed, and now has come to the end of a step" in told[0]

    assert on_ranks(1, work) == [True]


def test_an_announcement_given_up_is_a_broken_group() -> None:
    def work(communicator: Communicator) -> Any:
        return Announcer(communicator).agree()

    (told,) = on_ranks(1, work)
    assert isinstance(told, CommunicationFailedError) and "abandoned" in str(told)


def test_a_rank_that_is_gone_is_no_disagreement() -> None:
    """Who waits for it in a reduction hears of a broken group; who has ended needs no answer."""

    def work(communicator: Communicator, ended: bool) -> Any:
        speaker = Announcer(communicator)
        if communicator.rank:
            communicator.close()
            return None
        if ended:
            return speaker.announce_finished(Announced(Intent.FINISH), 1, 20.0)
        speaker.start_quietly(Announced(Intent.GRADIENTS), 1)
        speaker.wait(communicator.gradients.all_reduce(torch.ones(1)))

    assert on_ranks(2, lambda communicator: work(communicator, True)) == [False, None]
    broken, _ = on_ranks(2, lambda communicator: work(communicator, False))
    assert isinstance(broken, CommunicationFailedError)


def test_rank_that_waits_long_says_so_and_meets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 announces something; rank 0 has waited by then, and its words are outdated."""
    monkeypatch.setattr("elastic_ray.consensus.announcer._PATIENCE_S", 0.05)
    monkeypatch.setattr("elastic_ray.consensus.announcer._HEARING_S", 0.05)
    late = threading.Event()

    def work(communicator: Communicator) -> Any:
        speaker = Announcer(communicator)
        value = torch.ones(2)
        speaker.start_quietly(Announced(Intent.GRADIENTS), 4)
        if communicator.rank:
            late.wait(0.4)
        speaker.wait(communicator.gradients.all_reduce(value))
        speaker.done()
        speaker.start(Announced(Intent.EDGE), 5, payload=[1.0])
        return value.tolist(), speaker.agree()[0]

    assert on_ranks(2, work) == [([2.0, 2.0], 2.0)] * 2


def test_a_rank_without_samples_takes_part_until_the_end() -> None:
    """Rank 1 has none: it joins a call, then the end, and hears the sums of the other."""

    def work(communicator: Communicator) -> Any:
        one, joined, end = Rank(communicator), list[Announced](), Announced(Intent.EDGE, 1)
        if communicator.rank == 0:
            one.consensus.agree_on(Announced(Intent.SHARDS, 2))
            added = {(0, 0): {"loss": 3.0}}
            found = one.consensus.vote(end, added, some_are_idle=True)
        else:
            found = one.consensus.vote(end, {}, some_are_idle=True, join=joined.append)
        return found, joined

    sums = [((0, 0), "loss", 3.0)]
    assert on_ranks(2, work) == [(sums, []), (sums, [Announced(Intent.SHARDS, 2)])]


class Slow(Writer):
    """Is ready once it was asked, unless it never is."""

    def __init__(self, outcome: Readiness = Readiness.READY) -> None:
        self.asked, self.begun, self.outcome = 0, 0, outcome

    def readiness(self, rank: int, world_size: int, *, now: bool) -> Readiness:
        self.asked += 1
        return self.standing()

    def standing(self) -> Readiness:
        return self.outcome if self.asked else Readiness.NOT_YET

    def start(self) -> None:
        self.begun += 1


def _decided(ranks: Sequence[SaveAgreement], *, now: bool = False) -> list[Saving]:
    ballots = [each.ballot(number, len(ranks), divided=True, now=now) for number, each in enumerate(ranks)]
    sums = [sum(each) for each in zip(*ballots, strict=True)]
    return [each.decide(sums, number, len(ranks), now=now) for number, each in enumerate(ranks)]


def test_a_rank_not_ready_is_waited_for_unless_ending() -> None:
    ranks = [SaveAgreement(), SaveAgreement()]
    ranks[0].serve(Writer())
    slow = Slow(Readiness.NOT_YET)
    ranks[1].serve(slow)
    assert _decided(ranks) == [Saving.LATER] * 2 and ranks[0].pop_order() is None
    assert _decided(ranks, now=True) == [Saving.ALONE] * 2 and ranks[0].together
    slow.outcome = Readiness.NEVER
    assert _decided(ranks) == [Saving.ALONE] * 2
    assert [each.refusals for each in ranks] == [1, 1] and not ranks[0].together
    ranks[0].start()
    assert ranks[0].together, "another group's refusal does not count"
    slow.outcome = Readiness.READY
    assert _decided(ranks) == [Saving.TOGETHER] * 2
    orders = [each.pop_order() for each in ranks]
    assert orders[0] is not None and orders[1] is not None and orders[0].token == orders[1].token != "0" * 9
    assert [(each.rank, each.world_size) for each in orders if each] == [(0, 2), (1, 2)]
    assert ranks[0].pop_order() is None, "once"


def test_the_control_sums_say_what_a_ballot_would() -> None:
    ranks = [SaveAgreement(), SaveAgreement()]
    for each in ranks:
        each.serve(Writer())
    assert ranks[0].pop_sums(2) == ()
    sums = [sum(each) for each in zip(*(each.values(n, 2) for n, each in enumerate(ranks)), strict=True)]
    assert len(sums) == ranks[0].size(2) == 4
    for number, each in enumerate(ranks):
        each.conclude(sums, 2)
        heard = each.pop_sums(2)
        assert heard == (2.0, *sums) and each.pop_sums(2) == ()
        assert each.decide(heard, number, 2, now=False) is Saving.TOGETHER
    token = (round(sums[0]) << 16) + round(sums[1])
    order = ranks[1].pop_order()
    assert order is not None and int(order.token, 16) == token > 0
    ranks[0].conclude(sums, 2)
    ranks[0].start()
    assert ranks[0].pop_sums(2) == (), "they were another group's"


def test_without_a_writer_a_rank_says_never_prepares_nothing() -> None:
    nobody, writer = SaveAgreement(), Slow()
    assert nobody.values(0, 2) == (0.0, 0.0, 0.0, 1.0) and not nobody.together
    assert nobody.ballot(0, 2, divided=True, now=False) == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert nobody.ballot(0, 2, divided=False, now=False) == [0.0] * 5
    nobody.prepare(0, 2)
    nobody.serve(writer)
    assert nobody.together and nobody.values(0, 2)[2:] == [1.0, 0.0]
    nobody.prepare(0, 2)
    assert writer.asked == 1 and nobody.values(0, 2)[2:] == [0.0, 0.0]
    nobody.start()
    assert writer.begun == 1
    nobody.given_up = True
    nobody.prepare(0, 2)
    assert writer.asked == 1 and not nobody.together and nobody.values(0, 2) == (0.0, 0.0, 0.0, 1.0)


def test_the_critical_batch_is_that_of_rank_0() -> None:
    ranks = [_agreed(critical_batch=size) for size in (192, 0, 64)]
    _summed(*ranks)
    assert [each.critical_batch for each in ranks] == [192] * 3
    for each in ranks:
        each.start()
    assert {each.critical_batch for each in ranks} == {None}, "joiners know none before their first step"
