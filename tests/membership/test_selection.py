"""Who makes up the next planned generation: pure, so that all small cases can be looked at."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.membership.instructions import Announce
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.membership.roster import Roster, WorkerPhase, WorkerRecord
from elastic_ray.membership.selection import next_group
from elastic_ray.membership.signals import Allocated
from placement.cluster.sizes import ANY_SIZE, AllowedSizes
from tests.membership.driver import CONFIG, members_of, only, plan_in, running

PHASES = (WorkerPhase.MEMBER, WorkerPhase.READY, WorkerPhase.STARTING, WorkerPhase.RESERVING)
EVEN = AllowedSizes(sizes=(1, 2, 4, 8))


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
    sizes=st.sampled_from([ANY_SIZE, EVEN, AllowedSizes(multiple_of=3), AllowedSizes(sizes=(3,))]),
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
    if group is None:
        size = len(stayers) + len(ready)
        assert there.in_phase(WorkerPhase.STARTING, WorkerPhase.RESERVING), "nobody is waited for who does not come"
        assert not hurry, "a node that goes does not wait"
        assert size < min(min_workers, len(members)) or (patient and not sizes.allow(size)), (
            "an allowed size is not waited for without end"
        )
        return
    assert group[: len(stayers)] == stayers and set(map(id, group[len(stayers) :])) <= set(map(id, ready))
    assert sizes.allow(len(group)) or group == stayers, "joiners make no size that is not allowed"


def test_who_leaves_waits_a_while_for_a_replacement_that_makes_up_an_allowed_size() -> None:
    driver = running(4, config=dataclasses.replace(CONFIG, sizes=EVEN))
    assert not only(Announce, driver.target(n1=3, n2=1))
    assert not only(Announce, driver.tick(after_s=CONFIG.patience_s * 0.9)), "w5 is on its way"
    assert members_of(plan_in(driver.tick(after_s=CONFIG.patience_s * 0.2))) == ["w1", "w2", "w3"]


@pytest.mark.parametrize("min_workers", [1, 4])
def test_who_leaves_a_node_that_is_about_to_go_waits_for_nobody(min_workers: int) -> None:
    driver = running(4, config=dataclasses.replace(CONFIG, sizes=EVEN, min_workers=min_workers))
    out = driver.tell(Allocated(nodes={"n1": 3, "n2": 1}, reason="n1 goes", draining=("n1",)))
    assert members_of(plan_in(out)) == ["w1", "w2", "w3"]
