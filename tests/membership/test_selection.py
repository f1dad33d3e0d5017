"""Who makes up the next planned generation: pure, so that all small cases can be looked at."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.events import EventKind
from elastic_ray.membership.instructions import Announce, Note
from elastic_ray.membership.machine import first_group, next_group
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.membership.roster import Roster, WorkerPhase, WorkerRecord
from elastic_ray.membership.signals import Allocated, StepFailed
from placement.cluster.sizes import ANY_SIZE, AllowedSizes, MemoryNeed
from tests.membership.driver import CONFIG, Driver, members_of, only, plan_in, running

PHASES = (WorkerPhase.MEMBER, WorkerPhase.READY, WorkerPhase.STARTING, WorkerPhase.RESERVING)
EVEN = AllowedSizes(sizes=(1, 2, 4, 8))
FOUR = MemoryNeed(available_bytes=50, sharded_bytes=100)  # fits from four workers on
ALL_SIZES = (
    *(ANY_SIZE, EVEN, AllowedSizes(multiple_of=3), AllowedSizes(sizes=(3,))),
    *(AllowedSizes(memory=FOUR), AllowedSizes(memory=FOUR, sizes=(2, 4)), AllowedSizes(memory=FOUR, multiple_of=3)),
)


def roster(*phases: WorkerPhase) -> Roster:
    """Workers in these phases, on a node each."""
    made = Roster()
    for number, phase in enumerate(phases, 1):
        worker = f"w{number}"
        made.workers[worker] = WorkerRecord(worker=worker, node=f"n{number}", phase=phase, since_s=0.0)
    members = tuple(Member(worker=w.worker, node=w.node) for w in made.in_phase(WorkerPhase.MEMBER))
    made.current = GenerationSpec(generation=1, members=members)
    return made


@given(
    phases=st.lists(st.sampled_from(PHASES), min_size=1, max_size=9).filter(lambda each: PHASES[0] in each),
    leaving=st.integers(0, 4),
    min_workers=st.integers(1, 4),
    sizes=st.sampled_from(ALL_SIZES),
    patient=st.booleans(),
    hurry=st.booleans(),
)
def test_a_planned_change_waits_for_a_reason_that_ends(
    phases: list[WorkerPhase], leaving: int, min_workers: int, sizes: AllowedSizes, patient: bool, hurry: bool
) -> None:
    there = roster(*phases)
    members, ready = there.members(), there.in_phase(WorkerPhase.READY)
    leavers = members[len(members) - min(leaving, len(members)) :]
    group = next_group(there, leavers, min_workers=min_workers, sizes=sizes, patient=patient, hurry=hurry)
    stayers = [w for w in members if w not in leavers] or members[:1]
    few = sizes.fitting > 1 and len(stayers) < sizes.fitting
    if few and group is not None:  # some that leave are kept
        assert len(group) >= min(sizes.fitting, len(members)), "no planned change makes a group lack memory"
        assert set(map(id, stayers)) <= set(map(id, group)) <= set(map(id, members + ready))
        assert group != members or not (leavers and ready), "those that leave find their way out"
        return
    if group is None:
        size = len(stayers) + len(ready)
        kept = few and len(leavers) > 0
        assert there.in_phase(WorkerPhase.STARTING, WorkerPhase.RESERVING), "nobody is waited for who does not come"
        assert not hurry, "a node that goes does not wait"
        assert size < min(min_workers, len(members)) or (patient and (kept or not sizes.allow(size))), (
            "an allowed size is not waited for without end"
        )
        return
    assert group[: len(stayers)] == stayers and set(map(id, group[len(stayers) :])) <= set(map(id, ready))
    assert sizes.allow(len(group)) or group == stayers, "joiners make no size that is not allowed"


def test_a_leaver_waits_a_while_for_an_allowed_size() -> None:
    driver = running(4, config=dataclasses.replace(CONFIG, sizes=EVEN))
    assert not only(Announce, driver.target(n1=3, n2=1))
    assert not only(Announce, driver.tick(after_s=CONFIG.patience_s * 0.9)), "w5 is on its way"
    assert members_of(plan_in(driver.tick(after_s=CONFIG.patience_s * 0.2))) == ["w1", "w2", "w3"]


def test_workers_that_lack_memory_keep_leavers_until_others_come() -> None:
    driver = running(4, config=dataclasses.replace(CONFIG, sizes=AllowedSizes(memory=FOUR), min_workers=4))
    out = driver.notify(Allocated(nodes={"n2": 4}, reason="n1 goes", draining={"n1": 0.0}))
    assert not only(Announce, out), "one alone would have to hold everything"
    driver.reserved("w5", "w6", "w7", "w8")
    assert members_of(plan_in(driver.ready("w5"))) == ["w1", "w2", "w3", "w5"]


def test_a_group_below_its_memory_goes_on_told_once() -> None:
    driver = running(4, config=dataclasses.replace(CONFIG, sizes=AllowedSizes(memory=FOUR), min_workers=4))
    out = driver.lost("w4")
    assert members_of(plan_in(out)) == ["w1", "w2", "w3"]
    (told,) = only(Note, out)
    assert (told.kind, told.from_workers, told.to_workers) == (EventKind.WARNING, 4, 3)
    assert told.reason.startswith("the job continues with 3 workers, fewer than the 4 that its memory needs")
    assert told.reason.endswith("a worker needs 67 B in a group of 3 and has 50 B")
    out = driver.lost("w3")
    assert [note.to_workers for note in only(Note, out) if note.kind is EventKind.WARNING] == [2]
    out = driver.switched(3, "w1", "w2")
    out += driver.notify(StepFailed(worker="w1", generation=3, cause="a peer was silent"))
    out += driver.tick(after_s=CONFIG.notice_s)
    assert members_of(plan_in(out)) == ["w1", "w2"]
    assert not [note for note in only(Note, out) if note.kind is EventKind.WARNING]


@pytest.mark.parametrize("first", [1, 2])
def test_a_restart_with_few_samples_says_it_lacks_memory(first: int) -> None:
    driver = Driver(dataclasses.replace(CONFIG, sizes=AllowedSizes(memory=FOUR), min_workers=4), first_most=first)
    driver.target(n1=4)
    driver.reserved("w1", "w2", "w3", "w4")
    out = driver.ready("w1", "w2", "w3", "w4")
    assert members_of(plan_in(out)) == ["w1", "w2"][:first]
    assert [note.kind for note in only(Note, out)] == [EventKind.WARNING]
    out = driver.switched(1, *["w1", "w2"][:first])
    assert members_of(plan_in(out)) == ["w1", "w2", "w3", "w4"]
    assert not [note for note in only(Note, out) if note.kind is EventKind.WARNING]


@pytest.mark.parametrize("min_workers", [1, 4])
def test_leavers_of_node_about_to_go_wait_for_nobody(min_workers: int) -> None:
    driver = running(4, config=dataclasses.replace(CONFIG, sizes=EVEN, min_workers=min_workers))
    out = driver.notify(Allocated(nodes={"n1": 3, "n2": 1}, reason="n1 goes", draining={"n1": 0.0}))
    assert members_of(plan_in(out)) == ["w1", "w2", "w3"]


def test_after_all_were_lost_only_starting_holders_are_awaited() -> None:
    there = roster(WorkerPhase.READY, WorkerPhase.READY, WorkerPhase.STARTING)
    one, two, third = there.workers.values()
    for holder in (one, two):
        holder.has_state = True
    assert first_group(there, wanted=1, most=0, patient=True) == [one, two]
    third.has_state = True
    assert first_group(there, wanted=1, most=0, patient=True) is None
    assert first_group(there, wanted=1, most=0, patient=False) == [one, two]
