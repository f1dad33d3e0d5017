"""A loop that is left by ``break`` in a step that is lost: all workers, joiners too, know where they are."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.adaptation import Policy, PolicyView
from elastic_ray.run.current import session_of_thread
from elastic_ray.sync import LocalSGD
from tests.loop.changing import Hold, Kill, run_job

SAMPLES, BATCH, STEPS, EPOCHS = 24, 6, 2, 3


def _holds_back(worker: str) -> Policy:
    """One worker comes out of its first step when the group that made it has broken in the next one."""
    session: Any = session_of_thread()

    class HoldsBack(Policy):
        def after_step(self, view: PolicyView) -> None:
            if session.worker == worker and session.progress.steps == 1:
                deadline = time.monotonic() + 30.0
                while not session.membership.voided and time.monotonic() < deadline:
                    time.sleep(0.002)

    return HoldsBack()


def loop(held_back: str = "") -> tuple[float, int, float]:
    """Two of an epoch's four steps: a parameter, the number of steps, the samples that were counted."""
    torch.manual_seed(1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = er.AdaptiveDataParallel(model, optimizer, policy=_holds_back(held_back))
    loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(SAMPLES).float()), batch_size=BATCH, seed=3)
    counted = 0.0
    for _ in er.remaining_epochs_until(EPOCHS):
        sums = er.Accumulator()
        for (x,) in loader:
            optimizer.zero_grad()
            (model(x[:, None] / 10) - 1).square().mean().backward()
            optimizer.step()
            sums["samples"] += len(x)
            if _nth() == STEPS:
                break
        counted += sums["samples"]
    return model.module.bias.item(), er.get_context().get_global_step(), counted


def _nth() -> int:
    """Which of its pass's steps the loop is in, from 1."""
    step = session_of_thread().ledger.step
    assert step is not None
    return (step.loader_pass.position + step.count) // BATCH


@pytest.mark.parametrize("joins", [(), (4,)])
def test_step_left_by_break_and_lost_is_told_alone(joins: tuple[int, ...]) -> None:
    outcome = run_job(loop, [Kill(1, 2, "backward", last=True, joins=joins)], first=(1, 2, 3))
    results = set(outcome.results.values())
    assert len(results) == 1 and {(steps, samples) for _, steps, samples in results} == {(5, 30.0)}
    (told,) = [text for kind, text, _ in outcome.told if kind == "warning"]
    assert "cannot draw it again, so its 6 samples are not used" in told


@pytest.mark.parametrize("joins", [(), (4,)])
@pytest.mark.parametrize("behind", [1, 3])
def test_worker_that_is_step_behind_follows_those_who_left(behind: int, joins: tuple[int, ...]) -> None:
    script = [Kill(1, 2, "backward", after=(4 - behind,), joins=joins)]
    outcome = run_job(lambda: loop(f"w{behind}"), script, first=(1, 2, 3))
    assert set(outcome.groups) == {(1, 2, 3), (1, 3, *joins)}
    results = set(outcome.results.values())
    assert len(results) == 1 and {(steps, samples) for _, steps, samples in results} == {(5, 30.0)}
    (told,) = [text for kind, text, _ in outcome.told if kind == "warning"]
    assert "cannot draw it again, so its 6 samples are not used" in told


@pytest.mark.parametrize("joins", [(), (4,)])
def test_an_update_that_was_made_before_the_loss_counts(joins: tuple[int, ...]) -> None:
    (undisturbed,) = set(run_job(loop, [], first=(1, 2, 3)).results.values())
    outcome = run_job(loop, [Kill(1, 2, "edge", last=True, joins=joins)], first=(1, 2, 3))
    (result,) = set(outcome.results.values())
    assert result[1:] == (6, 30.0) and undisturbed[1:] == (6, 36.0)
    assert result[0] == pytest.approx(undisturbed[0], abs=1e-6)
    (told,) = [text for kind, text, _ in outcome.told if kind == "warning"]
    assert "counts, but not what accumulators were given for its 6 samples" in told


def ended_loop() -> tuple[float, int]:
    """The same, for loops that let the pass end with a step."""
    torch.manual_seed(1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(SAMPLES).float()), batch_size=BATCH, seed=3)
    for _ in er.remaining_epochs_until(EPOCHS):
        for (x,) in loader.batches(joined_later=True):
            optimizer.zero_grad()
            (model(x[:, None] / 10) - 1).square().mean().backward()
            optimizer.step()
            if _nth() == STEPS:
                session_of_thread().passes.end_after_step()
    return model.module.bias.item(), er.get_context().get_global_step()


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("moment", ["backward", "optimizer_step", "after_step", "edge"])
@pytest.mark.parametrize("joins", [(), (4,)])
def test_pass_to_end_with_a_lost_step_draws_again(moment: str, joins: tuple[int, ...]) -> None:
    (undisturbed,) = set(run_job(ended_loop, [], first=(1, 2, 3)).results.values())
    outcome = run_job(ended_loop, [Kill(1, 2, moment, joins=joins)], first=(1, 2, 3))
    (result,) = set(outcome.results.values())
    assert result[1] == undisturbed[1] == STEPS * EPOCHS
    assert result[0] == pytest.approx(undisturbed[0], abs=1e-6)


def nested_trainings(
    *, leaves: bool = False, first: bool = True, most: int = BATCH, accumulates: bool = False
) -> tuple[float, int, int]:
    """Updates in a nested loop, all or two of its three, and one of the loop around it: parameter, steps, schedule."""
    torch.manual_seed(1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
    model = er.AdaptiveDataParallel(model, optimizer, lr_scheduler=schedule, scaling_rule="none")
    rows = TensorDataset(torch.arange(SAMPLES).float())
    loader = er.AdaptiveDataLoader(rows, batch_size=BATCH, seed=3)
    loader.autoscale_batch_size(2 * BATCH, (1, most), gradient_accumulation=accumulates)
    inner = er.AdaptiveDataLoader(TensorDataset(rows.tensors[0][:18]), batch_size=BATCH, seed=4)

    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x[:, None] / 10) - 1).square().mean().backward()
        optimizer.step()
        schedule.step()

    for _ in er.remaining_epochs_until(1):
        for (x,) in loader:
            if first:
                train(x)
            for (other,) in inner:
                train(other)
                session_of_thread().moment("nested")
                if leaves and inner.batches_left == 1:
                    break
            if not first:
                train(x)
    return model.module.bias.item(), er.get_context().get_global_step(), schedule.last_epoch


@pytest.mark.parametrize("moment", ["allreduce", "optimizer_step", "edge", "nested"])
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_each_update_of_nested_trainings_is_made_once(first: bool, leaves: bool, moment: str) -> None:
    def train() -> tuple[float, int, int]:
        return nested_trainings(leaves=leaves, first=first)

    (undisturbed,) = set(run_job(train, [], first=(1, 2, 3)).results.values())
    (result,) = set(run_job(train, [Kill(2, 1, moment)], first=(1, 2, 3)).results.values())
    assert result == (pytest.approx(undisturbed[0], abs=1e-6), *undisturbed[1:])


@pytest.mark.parametrize("first", [False, True])
def test_nested_training_between_micro_batches_is_refused(first: bool) -> None:
    with pytest.raises(RuntimeError, match="let one loop follow the other"):
        run_job(lambda: nested_trainings(first=first, most=3, accumulates=True))


def test_no_step_with_a_nested_training_is_halved() -> None:
    def train() -> tuple[float, int, int]:
        session_of_thread().registry.need_halves()
        return nested_trainings(most=2 * BATCH)

    (alone,) = run_job(train).results.values()
    (result,) = set(run_job(train, first=(1, 2)).results.values())
    assert result == (pytest.approx(alone[0], abs=1e-6), *alone[1:])


def both_left() -> list[bool]:
    """Leaves a loop within a loop, and that one, before a third: which passes have ended there."""
    loader, inner, third = (
        er.AdaptiveDataLoader(TensorDataset(torch.arange(SAMPLES).float()), batch_size=BATCH) for _ in range(3)
    )
    for _ in er.remaining_epochs_until(1):
        for _ in loader:
            for _ in inner:
                break
            break
        for _ in third:
            pass
        return [each.done for each in session_of_thread().progress.passes]
    raise AssertionError("no epoch")


@pytest.mark.parametrize("world", [1, 2])
def test_a_pass_left_with_one_within_it_has_ended(world: int) -> None:
    outcome = run_job(both_left, [], first=tuple(range(1, world + 1)))
    assert list(outcome.results.values()) == [[True, True]] * world


def leaves_both() -> tuple[float, float]:
    """Trains in a step of a loop within a loop, and leaves both: a parameter, the samples of a third loop."""
    torch.manual_seed(1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = er.AdaptiveDataParallel(model, optimizer)
    rows = TensorDataset(torch.arange(SAMPLES).float()[:, None] / 10)
    loader, inner, third = (er.AdaptiveDataLoader(rows, batch_size=BATCH) for _ in range(3))
    for _ in er.remaining_epochs_until(1):
        for _ in loader:
            for (x,) in inner:
                (model(x) - 1).square().mean().backward()
                optimizer.step()
                break
            break
        samples = er.Accumulator()
        for (x,) in third:
            samples["all"] += len(x)
    return model.module.bias.item(), int(samples["all"])


@pytest.mark.parametrize("moment", ["backward", "edge"])
@pytest.mark.parametrize("joins", [(), (4,)])
def test_loss_after_two_breaks_gives_up_both_passes(moment: str, joins: tuple[int, ...]) -> None:
    (undisturbed,) = set(run_job(leaves_both, [], first=(1, 2)).results.values())
    outcome = run_job(leaves_both, [Kill(0, 2, moment, last=True, joins=joins)], first=(1, 2))
    (result,) = set(outcome.results.values())
    assert result[1] == SAMPLES
    assert (result[0] == pytest.approx(undisturbed[0])) == (moment == "edge"), "an update that was made counts"
    (told,) = [text for kind, text, _ in outcome.told if kind == "warning"]
    assert f"its {2 * BATCH} samples are not used" in told or moment == "edge"


def evaluates_within(*, leaves: bool = False, **options: Any) -> tuple[int, float, float]:
    """Evaluates in an epoch's second step, and may leave its loop then: the steps, the samples of each loop."""
    torch.manual_seed(1)
    model: Any = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = er.AdaptiveDataParallel(model, optimizer, **options)
    rows = TensorDataset(torch.arange(SAMPLES).float()[:, None] / 10)
    loader, inner = (er.AdaptiveDataLoader(rows, batch_size=BATCH) for _ in range(2))
    trained = evaluated = 0.0
    for _ in er.remaining_epochs_until(2):
        sums = er.Accumulator()
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            sums["trained"] += len(x)
            if _nth() == 2:
                for (other,) in inner:
                    sums["evaluated"] += len(other)
                if leaves:
                    break
        trained, evaluated = trained + sums["trained"], evaluated + sums["evaluated"]
    return er.get_context().get_global_step(), trained, evaluated


@pytest.mark.parametrize("joins", [(), (3,)])
@pytest.mark.parametrize(
    ("leaves", "moment", "counted"),
    [
        (False, "backward", (8, 2 * SAMPLES, 2 * SAMPLES)),
        (False, "after_step", (8, 2 * SAMPLES, 2 * SAMPLES)),
        (True, "backward", (3, 3 * BATCH, SAMPLES)),  # what was left is not drawn again
        (True, "after_step", (4, 3 * BATCH)),  # but for an update that was made
    ],
)
def test_lost_step_with_an_evaluation_counts_once(
    leaves: bool, moment: str, counted: tuple[int, ...], joins: tuple[int, ...]
) -> None:
    script = [Kill(1, 2, moment, last=True, joins=joins)]
    outcome = run_job(lambda: evaluates_within(leaves=leaves), script, first=(1, 2))
    assert {each[: len(counted)] for each in outcome.results.values()} == {counted}


def test_averaged_step_with_an_evaluation_counts_once() -> None:
    script = [Kill(1, 2, "backward", last=True)]
    outcome = run_job(lambda: evaluates_within(strategy=LocalSGD(period=1)), script, first=(1, 2))
    assert set(outcome.results.values()) == {(8, 2 * SAMPLES, 2 * SAMPLES)}


def accumulates_within() -> float:
    """Trains in a loop within a step, in two micro-batches on each of two workers."""
    model: Any = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    inner = er.AdaptiveDataLoader(TensorDataset(torch.arange(8.0)), batch_size=8)
    inner.autoscale_batch_size(8, local_bsz_bounds=(1, 2), gradient_accumulation=True)
    for _ in er.remaining_epochs_until(1):
        for _ in er.AdaptiveDataLoader(TensorDataset(torch.arange(2.0)), batch_size=2):
            for (x,) in inner:
                optimizer.zero_grad()
                model(x[:, None]).mean().backward()
                optimizer.step()
    return model.module.weight.item()


def test_micro_batches_of_a_nested_training_make_one_update() -> None:
    assert set(run_job(accumulates_within, [], first=(1, 2)).results.values()) == {-3.5}


@pytest.mark.parametrize("dies_at", ["forward", "allreduce"])
def test_worker_in_nested_pass_of_committed_step_follows(dies_at: str) -> None:
    """Worker 2 is at the end of that pass when worker 3 has gone on to the next step, where worker 1 dies."""
    script = [Hold(1, 2, "end_of_pass", fails=True), Kill(2, 1, dies_at, after=(3,), after_moment="forward")]
    (undisturbed,) = set(run_job(nested_trainings, [], first=(1, 2, 3)).results.values())
    outcome = run_job(nested_trainings, script, first=(1, 2, 3))
    assert outcome.groups[:2] == [(1, 2, 3), (2, 3)]
    (result,) = set(outcome.results.values())
    assert result == (pytest.approx(undisturbed[0], abs=1e-6), *undisturbed[1:])
