"""Nothing of a gradient is lost by compression: what was applied and what is owed add up, whatever the group does.

The parameters stay where they are (learning rate 0), so the exact gradient of every step is known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_ray.loop.api import current_session
from elastic_ray.sync import Strategy
from elastic_ray.sync.engine.reduction import PROBE_EVERY
from elastic_ray.sync.spec import Owner, Reduce, Rule, Wire
from tests.loop.alone import session_of
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.sync.owed import (
    BATCH,
    EPOCHS,
    NAMES,
    SAMPLES,
    WAYS,
    Loop,
    exact,
    net,
    total,
    ways,
)


class Looked(nn.Module):
    """Looks rows of a table up by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(60, 12), net()
        with torch.no_grad():
            self.table.weight.copy_(torch.linspace(-2.0, 2.0, 720).sin().view(60, 12))

    def forward(self, x: Tensor) -> Tensor:
        looked: Tensor = self.net(self.table((x[:, :2].abs() * 25).long() % 60).sum(1))
        return looked


STEPS = SAMPLES // BATCH * EPOCHS


def run(loop: Loop, script: Sequence[Change | Kill], first: Sequence[int]) -> tuple[Outcome, Tensor, Tensor]:
    """The outcome, the sum of what was applied over all steps, and of what is owed at the end over all ranks."""
    outcome = run_job(loop, script, first=first)
    return outcome, total(loop), torch.stack([outcome.results[worker] for worker in outcome.groups[-1]]).sum(0)


def assert_all_there(applied: Tensor, owed: Tensor, wanted: Tensor) -> None:
    """To 1e-6 of it, and not because nothing was owed."""
    assert float(owed.norm()) > 1e-3 * float(wanted.norm()) / STEPS
    assert float((applied + owed - wanted).norm()) < 1e-6 * float(wanted.norm())


@ways
@pytest.mark.parametrize(
    ("first", "script"),
    [
        ((1, 2), []),
        ((1, 2, 3), []),
        ((1, 2), [Change(3, (1, 2, 3, 4)), Change(6, (2, 3, 4)), Change(9, (3, 5))]),
        ((1, 2, 3), [Change(2, (1, 2)), Change(3, (2, 3)), Change(8, (3, 4, 5))]),
        ((1, 2), [Change(3, (2,)), Change(6, (2, 3))]),
    ],
)
@pytest.mark.matrix(every=6)
def test_changes_of_group_keep_the_sum(way: Any, first: Sequence[int], script: Sequence[Change]) -> None:
    outcome, applied, owed = run(Loop(way), script, first)
    assert outcome.told == [] and len(outcome.groups) == len(script) + 1
    assert_all_there(applied, owed, exact().sum(0))


@ways
def test_worker_that_is_left_alone_sends_what_was_owed(way: Any) -> None:
    loop = Loop(way)
    _, applied, owed = run(loop, [Change(4, (2,))], (1, 2, 3))
    assert not bool(owed.any())
    wanted = exact()
    torch.testing.assert_close(loop.applied[2][6], wanted[6], rtol=1e-5, atol=1e-6)
    assert float((loop.applied[2][5] - wanted[5]).norm()) > 1e-3, "that is when it was sent"
    assert float((applied - wanted.sum(0)).norm()) < 1e-6 * float(wanted.sum(0).norm())


@pytest.mark.thorough
@ways
@pytest.mark.parametrize("moment", ["forward", "backward", "allreduce", "optimizer_step", "edge"])
@pytest.mark.matrix(every=6)
def test_a_killed_worker_loses_its_own_only_told(way: Any, moment: str) -> None:
    """It dies as the last to come so far: until its reductions are over the step is drawn again, then it counts."""
    loop = Loop(way)
    outcome, applied, owed = run(loop, [Kill(5, 2, moment, last=True)], (1, 2, 3))
    ((kind, text, detail),) = outcome.told
    assert kind == "warning" and "what compression had left out of the gradients of 1 worker" in text
    assert detail == {"workers": 1}
    if moment == "optimizer_step":  # what it left out in this step died with it, unseen
        return
    lost = loop.after[2][5] if moment == "edge" else loop.before[2][5]
    assert float(lost.norm()) > 0
    assert_all_there(applied, owed + lost, exact().sum(0))


@ways
@pytest.mark.parametrize("script", [[], [Change(5, (1, 2, 3))], [Change(5, (2, 3))]])
@pytest.mark.parametrize(("every", "synced"), [(2, 1), (7, 1), (2, 2)])
@pytest.mark.matrix(every=8)
def test_debts_enter_gradients_added_up_by_hand_once(
    way: Any, every: int, synced: int, script: Sequence[Change]
) -> None:
    _, applied, owed = run(Loop(way, every=every, synced=synced), script, (1, 2))
    assert_all_there(applied, owed, exact().sum(0))


@ways
def test_what_is_owed_enters_an_accumulation_once(way: Any) -> None:
    _, applied, owed = run(Loop(way, micro=2, batch_size=8), [], (1, 2))
    assert_all_there(applied, owed, exact(8).sum(0))


@ways
def test_amps_scale_may_change_and_overflow_changes_nothing(way: Any) -> None:
    left_out: list[int] = []

    def spoil(step: int, wrapped: Any) -> None:
        session = current_session()
        if step in (4, 9) and session.rank == session.world_size - 1 and step not in left_out:
            left_out.append(step)
            wrapped.module[0].bias.register_hook(_once(float("inf")))

    def scaler() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)

    loop = Loop(way, scaler=scaler, inside=spoil)
    outcome = run_job(loop, first=(1, 2))
    assert left_out == [4, 9]
    for worker in (1, 2):
        for step in left_out:
            assert not bool(loop.applied[worker][step].isfinite().all())
            assert torch.equal(loop.after[worker][step], loop.before[worker][step])
    good = [step for step in range(STEPS) if step not in left_out]
    assert_all_there(total(loop, left_out), outcome.results[1] + outcome.results[2], exact()[good].sum(0))


def _once(value: float) -> Callable[[Tensor], Tensor | None]:
    """A gradient hook that spoils the next gradient."""
    used: list[bool] = []

    def hook(gradient: Tensor) -> Tensor | None:
        if used:
            return None
        used.append(True)
        return torch.full_like(gradient, value)

    return hook


@ways
def test_a_step_redrawn_after_its_update_owes_no_more(way: Any) -> None:
    """Worker 2 dies before a vote on the step, which all have applied."""
    loop = Loop(way, votes=True)
    outcome = run_job(loop, [Kill(5, 2, "edge", last=True)], first=(1, 2, 3))
    wanted = exact().sum(0)
    drawn_again = loop.applied[1].pop(5)  # the second time, when nothing was applied
    assert torch.equal(drawn_again, loop.applied[3].pop(5))
    first = loop.applied[2][5]  # the first time
    owed = outcome.results[1] + outcome.results[3] + loop.after[2][5]
    assert outcome.told[0][2] == {"workers": 1}
    loop.applied[2][5] = first
    assert_all_there(total(loop), owed, wanted)


# -- other strategies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*WAYS, "all_reduce", "ps", "bf16"], ids=[*NAMES, "all_reduce", "ps", "bf16"])
@pytest.mark.parametrize("script", [[], [Kill(5, 3, "backward", last=True)], [Change(8, (1, 2, 3, 4))]])
@pytest.mark.matrix(every=12)
def test_what_is_owed_goes_on_under_the_next_strategy(way: Any, script: list[Any]) -> None:
    """Sent at once where that does not compress; a step that is lost there has sent nothing."""

    def switch(step: int, wrapped: Any) -> None:
        if step == 5:
            wrapped.set_strategy(way)

    loop = Loop("int8" if way != "int8" else WAYS[1], inside=switch)
    outcome, applied, owed = run(loop, script, (1, 2, 3))
    killed = bool(script) and isinstance(script[0], Kill)
    assert len(outcome.told) == int(killed)
    assert bool(owed.any()) == (way in WAYS)
    lost = loop.before[3][5] if killed else torch.zeros(())
    wanted = exact().sum(0)
    assert float((applied + owed + lost - wanted).norm()) < (1e-6 if way != "bf16" else 1e-2) * float(wanted.norm())


@pytest.mark.matrix(every=3)
@ways
@pytest.mark.parametrize(
    "script", [[Change(8, (1, 2))], [Change(4, (1, 2))], [Change(4, (1, 2, 4)), Change(7, (2, 4))]]
)
def test_a_leavers_debt_stays_where_strategies_were_set(way: Any, script: list[Change]) -> None:
    """Also where it takes effect with the next group's first step."""

    def switch(step: int, wrapped: Any) -> None:
        if step == 4:
            wrapped.set_strategy(way)

    outcome, applied, owed = run(Loop("all_reduce", inside=switch), script, (1, 2, 3))
    assert outcome.told == []
    assert_all_there(applied, owed, exact().sum(0))


def switch_behind(at: int, way: Any) -> Callable[[int, Any], None]:
    """Asks for a strategy after the update of a step."""

    def switch(step: int, wrapped: Any) -> None:
        if step == at:
            wrapped.set_strategy(way)

    return switch


@ways
@pytest.mark.parametrize("then", ["all_reduce", "ps", "parallax", "bf16"])
@pytest.mark.parametrize("script", [[Change(5, (1, 2))], [Change(5, (2, 3, 4))], [Change(5, (3,))]])
@pytest.mark.matrix(every=15)
def test_a_leavers_debt_stays_where_compression_ends(way: Any, then: str, script: list[Change]) -> None:
    outcome, applied, owed = run(Loop(way, behind=switch_behind(5, then)), script, (1, 2, 3))
    wanted = exact().sum(0)
    assert outcome.told == [] and not bool(owed.any())
    assert float((applied - wanted).norm()) < (1e-6 if then != "bf16" else 1e-2) * float(wanted.norm())


@pytest.mark.matrix(every=3)
@ways
@pytest.mark.parametrize("script", [[], [Change(5, (2, 3, 4))], [Change(5, (3,))]])
def test_a_tables_debt_is_sent_where_rows_travel_next(way: Any, script: list[Change]) -> None:
    outcome, applied, owed = run(Loop(way, behind=switch_behind(5, "parallax"), make=Looked), script, (1, 2, 3))
    wanted = exact(make=Looked).sum(0)
    assert outcome.told == [] and not bool(owed.any())
    assert float((applied - wanted).norm()) < 1e-6 * float(wanted.norm())


@ways
def test_leavers_debt_stays_where_it_could_not_be_sent(way: Any) -> None:
    """The one step after the switch overflows, and is the last of the group."""

    def spoil(step: int, wrapped: Any) -> None:
        session = current_session()
        if step == 6 and session.rank == 0 and not spoilt:
            spoilt.append(step)
            wrapped.module[0].bias.register_hook(_once(float("inf")))

    def scaler() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)

    spoilt: list[int] = []
    loop = Loop(way, scaler=scaler, inside=spoil, behind=switch_behind(5, "all_reduce"))
    outcome = run_job(loop, [Change(6, (2, 3, 4))], first=(1, 2, 3))
    wanted = exact()
    assert spoilt and outcome.told == []
    wanted = wanted[[step for step in range(STEPS) if step != 6]].sum(0)
    assert float((total(loop, [6]) - wanted).norm()) < 1e-6 * float(wanted.norm())


@ways
def test_debts_are_sent_where_models_are_averaged_next(way: Any) -> None:
    """There a rank's gradient is that of its own samples; the mean over ranks is the gradient of all."""
    loop = Loop(way, batch_size=8, behind=switch_behind(5, "local_sgd"))
    outcome = run_job(loop, first=(1, 2))
    wanted = exact(8).sum(0)
    applied = torch.stack([torch.stack(list(loop.applied[worker].values())).sum(0) for worker in (1, 2)]).mean(0)
    assert not any(bool(owed.any()) for owed in outcome.results.values())
    assert float((applied - wanted).norm()) < 1e-6 * float(wanted.norm())


@ways
def test_a_dead_workers_debt_is_told_after_switches(way: Any) -> None:
    def switch(step: int, wrapped: Any) -> None:
        if step == 2:
            wrapped.set_strategy(way)

    outcome = run_job(Loop("all_reduce", inside=switch), [Kill(6, 2, "backward", last=True)], first=(1, 2, 3))
    assert [detail for _, _, detail in outcome.told] == [{"workers": 1}]


# -- checkpoints ---------------------------------------------------------------------------------------------------


def captured(way: Any, world: int) -> dict[str, Any]:
    """The state of a job in its fifth step."""
    kept: list[dict[str, Any]] = []

    def save(step: int, wrapped: Any) -> None:
        if step == 5 and current_session().rank == 0:
            kept.append(copy.deepcopy(current_session().states.capture()))

    run_job(Loop(way, inside=save), first=tuple(range(1, world + 1)))
    return kept[0]


@pytest.mark.parametrize(("saved", "loaded"), [(WAYS[1], "all_reduce"), ("ps", WAYS[1]), ("int8", "ps_balanced")])
def test_a_state_of_one_strategy_loads_under_another(saved: Any, loaded: Any) -> None:
    session_of(captured(saved, 3))
    loop, wanted = Loop(loaded), exact()
    loop()
    ((_, applied),) = loop.applied.items()
    assert sorted(applied) == list(range(5, STEPS))
    for step, found in applied.items():
        torch.testing.assert_close(found, wanted[step], rtol=1e-5, atol=1e-6)


def test_what_others_owe_goes_on_when_an_owner_dies() -> None:
    """Buckets are planned anew, with other owners.

    It dies as the last to come so far: else a survivor may miss the end of the step before, and take that from others.
    """
    way = Strategy(rules=(Rule(pattern="0.weight", sync=Reduce(wire=Wire(dtype="int8"))),), default=Owner())
    loop, wanted = Loop(way), exact()
    run_job(loop, [Kill(5, 2, "allreduce", last=True), Change(8, (1, 3, 4))], first=(1, 2, 3))
    compressed = net()[0].weight.numel()
    for step, found in loop.applied[1].items():
        torch.testing.assert_close(found[compressed:], wanted[step][compressed:], rtol=1e-5, atol=1e-6)
    assert float((total(loop) - wanted.sum(0)).norm()) < 0.01 * float(wanted.sum(0).norm())


def test_the_first_step_is_a_probe() -> None:
    loop, wanted = Loop("int8"), exact()
    run_job(loop, first=(1, 2))
    assert STEPS < PROBE_EVERY
    torch.testing.assert_close(loop.applied[1][0], wanted[0], rtol=1e-5, atol=1e-6)
    assert float((loop.applied[1][1] - wanted[1]).norm()) > 1e-4 * float(wanted[1].norm())
