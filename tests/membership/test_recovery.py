"""A restarted controller takes over from the workers that live: what it begins with, and what it does first."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ray.events import Pause
from elastic_ray.membership.instructions import AllLost, Announce, Instruction, Reserve, Withdraw
from elastic_ray.membership.machine import JobMembership
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.membership.recovery import Recovered, SurvivingWorker, recover
from elastic_ray.membership.roster import WorkerPhase
from elastic_ray.membership.signals import Allocated, Ready, Reserved, StepFailed, Switched
from tests.membership.driver import CONFIG, only, plan_in


def spec(generation: int, *workers: str, void_below: int = 0) -> GenerationSpec:
    members = tuple(Member(worker=worker, node="n1") for worker in workers)
    return GenerationSpec(generation=generation, members=members, void_below=void_below)


def trains(worker: str, group: GenerationSpec, **more: Any) -> SurvivingWorker:
    """One that has entered this generation."""
    return SurvivingWorker(worker=worker, node="n1", spec=group, **{"switched": group.generation, **more})


def found(*survivors: SurvivingWorker) -> Recovered:
    return recover(survivors, world_size=3, now_s=7.0)


def phases(recovered: Recovered) -> dict[str, str]:
    return {name: record.phase.value for name, record in recovered.workers.items()}


def copied_arguments(
    *survivors: SurvivingWorker, target: int = 2, issued: int = 3, announced: tuple[str, ...] = (), **more: Any
) -> tuple[JobMembership, list[Instruction]]:
    machine = JobMembership(CONFIG)
    out = machine.recover(
        survivors,
        Allocated(nodes={"n1": target}, reason="test"),
        **{"issued": issued, "world_size": 2, "announced": announced, "trained": True, "now_s": 50.0, **more},
    )
    return machine, out


def test_members_that_train_are_the_group_in_effect() -> None:
    group = spec(4, "w1", "w2")
    recovered = found(trains("w2", group), trains("w1", group))
    assert phases(recovered) == {"w1": "member", "w2": "member"}
    assert list(recovered.workers) == ["w1", "w2"], "by age"
    assert (recovered.current, recovered.in_flight, recovered.issued) == (group, None, 4)
    assert recovered.gone == () and recovered.since == ()
    assert all(w.has_state and w.since_s == 7.0 and w.failed_in == -1 for w in recovered.workers.values())


@pytest.mark.parametrize("void_below", [0, 5])
def test_a_generation_that_some_have_entered_is_in_flight(void_below: int) -> None:
    before, after = spec(4, "w1", "w2", "w9"), spec(5, "w1", "w2", "w3", void_below=void_below)
    pause = Pause(state_s=2.0)
    waits = SurvivingWorker(worker="w2", node="n1", spec=after, switched=4)
    joins = SurvivingWorker(worker="w3", node="n1", spec=after, ready=Ready(worker="w3"))
    recovered = found(trains("w1", after, pause=pause), waits, joins)
    flight = recovered.in_flight
    assert flight is not None and flight.spec == after and flight.forced == bool(void_below)
    assert (flight.from_workers, flight.from_state, flight.since_s) == (3, True, 7.0)
    assert recovered.since == (Switched(worker="w1", generation=5, pause=pause),)
    assert recovered.current is None, "no worker remembers it"
    assert phases(recovered) == {"w1": "member", "w2": "member", "w3": "ready"}
    remembered = found(trains("w1", after), waits, trains("w9", before))
    assert remembered.current == before and remembered.in_flight is not None
    assert remembered.in_flight.from_workers == 3
    assert phases(remembered)["w9"] == "leaving", "the others have continued without it"
    assert remembered.gone == ("w3",)


def test_workers_before_their_first_generation_start_or_wait() -> None:
    recovered = found(
        SurvivingWorker(worker="w10", node="n1", ready=Ready(worker="w10", loaded=8)),
        SurvivingWorker(worker="w9", node="n2"),
        SurvivingWorker(worker="w2", node="n2", starts_over=True, ready=Ready(worker="w2")),
    )
    assert list(recovered.workers) == ["w2", "w9", "w10"]
    assert phases(recovered) == {"w2": "ready", "w9": "starting", "w10": "ready"}
    assert [w.has_state for w in recovered.workers.values()] == [True, False, False]
    assert [w.loaded for w in recovered.workers.values()] == [0, 0, 8]
    assert [w.state_generation for w in recovered.workers.values()] == [1, 0, 0]
    assert (recovered.current, recovered.in_flight, recovered.issued, recovered.since) == (None, None, 0, ())


def test_strangers_leave_restarters_keep_their_group_s_state() -> None:
    group = spec(4, "w1")
    out = SurvivingWorker(worker="w2", node="n1", spec=group, switched=3)
    over = SurvivingWorker(worker="w3", node="n1", starts_over=True)
    recovered = found(trains("w1", group, failed=StepFailed(worker="w1", generation=4, cause="reset")), out, over)
    assert phases(recovered) == {"w1": "member", "w2": "leaving", "w3": "starting"}
    assert not recovered.workers["w2"].has_state and recovered.workers["w3"].has_state
    assert recovered.workers["w3"].state_generation == 4 and recovered.workers["w1"].failed_in == 4
    assert recovered.since == (StepFailed(worker="w1", generation=4, cause="reset"),)


def test_numbers_perhaps_announced_are_called_off_and_not_reused() -> None:
    group = spec(4, "w1", "w2")
    machine, out = copied_arguments(trains("w1", group), trains("w2", group), issued=4)
    assert [each.generation for each in only(Withdraw, out)] == [5, 6, 7, 8]
    assert {each.to for each in only(Withdraw, out)} == {("w1", "w2")}
    assert not only(Announce, out) and machine.trained
    machine.handle(StepFailed(worker="w1", generation=4, cause="reset"), 50.0)
    assert plan_in(machine.handle(Switched(worker="w1", generation=3, pause=Pause()), 60.0)).generation == 9
    machine, out = copied_arguments(trains("w1", group), trains("w2", group), issued=20)
    assert [each.generation for each in only(Withdraw, out)] == list(range(17, 25)), "not all that ever were"


def test_a_generation_that_is_entered_is_not_called_off() -> None:
    after = spec(5, "w1", "w2")
    waits = SurvivingWorker(worker="w2", node="n1", spec=after, switched=4)
    machine, out = copied_arguments(trains("w1", after), waits, issued=5)
    assert [each.generation for each in only(Withdraw, out)] == [2, 3, 4, 6, 7, 8, 9]
    assert machine.current == after and machine.in_flight is not None, "w1 trains in it; w2 has yet to come"


def test_members_that_died_meanwhile_are_replaced_as_usual() -> None:
    group = spec(4, "w1", "w2")
    machine, out = copied_arguments(trains("w1", group), issued=4, named=6)
    assert plan_in(out).members == (Member(worker="w1", node="n1"),)
    assert "lost w2 while the controller was away" in plan_in(out).reason
    assert [each.worker for each in only(Reserve, out)] == ["w7"], "names are not used twice"
    machine.handle(Switched(worker="w1", generation=plan_in(out).generation, pause=Pause()), 51.0)
    machine.handle(Reserved(worker="w7"), 52.0)
    assert plan_in(machine.handle(Ready(worker="w7"), 60.0)).reason.startswith("in place of lost workers")


@pytest.mark.parametrize(
    ("trained", "announced", "lost"),
    [(True, (), True), (False, ("w1",), True), (False, ("w8",), False), (False, (), False)],
)
def test_newcomers_alone_go_on_only_where_nobody_trained(trained: bool, announced: tuple[str, ...], lost: bool) -> None:
    """Of those that a generation was announced to, one lives where it cannot have trained without the others."""
    fresh = SurvivingWorker(worker="w8", node="n1", ready=Ready(worker="w8"))
    machine, out = copied_arguments(fresh, target=1, trained=trained, announced=announced)
    assert bool(only(AllLost, out)) == lost
    assert lost or machine.workers["w8"].phase is WorkerPhase.READY
