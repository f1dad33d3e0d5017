"""Gradients that user code adds up over several steps of a loader: the same however the group changes within."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import elastic_ray as er
from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.reading import open_checkpoint
from elastic_ray.data.order import IndexOrder
from elastic_ray.loop.api import current_session
from elastic_ray.membership.messages import StopJob
from elastic_ray.run.current import WorkerDismissed
from elastic_ray.worker.state_saver import StateSaver
from tests.loop.alone import session_of
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.loop.small_net import BATCH, EPOCHS, EVERY, SAMPLES, STEPS, net, rows, weights


def trained_by_torch(lost: Sequence[int] = ()) -> Tensor:
    """The parameters that such a loop must give, by torch alone, without the gradients of some steps."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    (samples,) = rows().tensors
    step = 0
    for epoch in range(EPOCHS):
        for batch in torch.from_numpy(IndexOrder(samples=SAMPLES).epoch_order(3, epoch)[:]).split(BATCH):
            if step not in lost:
                (model(samples[batch]).square().mean() / EVERY).backward()
            step += 1
            if step % EVERY == 0:
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


class Loop:
    """One way to write such a loop; returns the parameters.

    Args:
        order: where the optimizer steps: "after" a step's backward, or "before" it.
        set_to_none: how gradients are zeroed.
        synced: how many steps' gradients are synchronised together.
        votes: whether ranks agree at each step's edge, by adding to an accumulator.
        inside: called in each step, after its backward.
    """

    def __init__(
        self,
        order: str = "after",
        set_to_none: bool = True,
        synced: int = 1,
        votes: bool = False,
        inside: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._order, self._set_to_none, self._synced = order, set_to_none, synced
        self._votes, self._inside = votes, inside

    def __call__(self) -> Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3)
        context, sums = er.get_context(), er.Accumulator()
        for _ in er.remaining_epochs_until(EPOCHS):
            if context.get_global_step() % EVERY == 0 and self._order == "after":
                optimizer.zero_grad(set_to_none=self._set_to_none)
            for (x,) in loader:
                step = context.get_global_step()
                if self._order == "before" and step % EVERY == 0:
                    self._apply(optimizer)
                with nullcontext() if (step + 1) % self._synced == 0 else wrapped.no_sync():
                    (wrapped(x).square().mean() / EVERY).backward()
                self._inside(step)
                if self._votes:
                    sums["samples"] += len(x)
                if self._order == "after" and (step + 1) % EVERY == 0:
                    self._apply(optimizer)
        if self._order == "before":
            self._apply(optimizer)
        return weights(model)

    def _apply(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=self._set_to_none)


def check(
    loop: Callable[[], Tensor], script: Sequence[Change | Kill], first: Sequence[int], lost: Sequence[int] = ()
) -> Outcome:
    """The parameters are those of a job that nobody has disturbed, on all ranks bit by bit."""
    wanted = trained_by_torch(lost)
    outcome = run_job(loop, script, first=first)
    assert sorted(outcome.results) == sorted(outcome.groups[-1])
    found = list(outcome.results.values())
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=1e-9)
    return outcome


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("step", [4, 5, 6, 7])
def test_a_joiner_has_what_was_added_up_before(step: int, order: str, set_to_none: bool) -> None:
    check(Loop(order, set_to_none), [Change(step, (1, 2))], first=(1,))


@pytest.mark.parametrize(
    ("first", "then"), [((1, 2), (1, 2, 3)), ((1, 2, 3), (1, 2)), ((1, 2), (1,)), ((1, 2), (2, 3))]
)
def test_any_change_in_the_middle(first: tuple[int, ...], then: tuple[int, ...]) -> None:
    check(Loop(), [Change(5, then)], first=first)


ANYWHERE = [(step, moment) for step in (4, 5, 7) for moment in ("forward", "backward", "allreduce", "edge")]
IN_OPTIMIZER = {"after": 7, "before": 4}


@pytest.mark.matrix(every=6)
@pytest.mark.parametrize(
    ("order", "step", "moment"),
    [(order, *where) for order in IN_OPTIMIZER for where in ANYWHERE]
    + [(*where, moment) for where in IN_OPTIMIZER.items() for moment in ("optimizer_step", "after_step")],
)
def test_a_lost_step_leaves_nothing_behind(step: int, moment: str, order: str) -> None:
    check(Loop(order), [Kill(step, 2, moment)], first=(1, 2, 3))


def test_a_whole_story() -> None:
    script = [Change(1, (1, 2)), Change(2, (1, 2, 3)), Kill(5, 1, "backward"), Change(6, (2, 3, 4)), Change(9, (4,))]
    outcome = check(Loop(), script, first=(1,))
    assert outcome.told == []


# -- gradients that differ by rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [((1,), (1, 2)), ((1, 2), (1, 2, 3, 4)), ((1, 2), (1,)), ((1, 2), (2, 3))])
def test_a_change_waits_for_gradients_that_are_not_reduced(first: tuple[int, ...], then: tuple[int, ...]) -> None:
    assert check(Loop(synced=EVERY), [Change(5, then)], first=first).told == []


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.session.group_changes._LONGEST_WAIT", 1)
    outcome = check(Loop(synced=EVERY), [Change(4, (1, 2, 4))], first=(1, 2), lost=(4, 5))
    ((kind, text, detail),) = outcome.told
    assert kind == "warning" and text.startswith("gradients of 2 steps are lost") and detail == {"steps": 2}


@pytest.mark.parametrize("moment", ["forward", "edge"])
def test_a_failure_that_loses_them_is_told(moment: str) -> None:
    outcome = check(Loop(synced=EVERY), [Kill(6, 2, moment)], first=(1, 2, 3), lost=(4, 5))
    ((kind, text, detail),) = outcome.told
    assert kind == "warning" and text.startswith("gradients of 2 steps are lost") and detail == {"steps": 2}


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("votes", [False, True])
@pytest.mark.parametrize("moment", ["optimizer_step", "after_step", "edge"])
def test_a_failure_after_they_were_applied_loses_nothing(moment: str, votes: bool) -> None:
    assert check(Loop(synced=EVERY, votes=votes), [Kill(7, 2, moment, last=True)], first=(1, 2)).told == []


@pytest.mark.parametrize("script", [Kill(6, 2, "forward"), Change(5, (1,)), Change(5, (1, 2, 3, 4))])
def test_what_was_reduced_before_the_optimizers_step_is_kept(script: Change | Kill) -> None:
    worlds = {}

    def note(step: int) -> None:
        worlds[step] = current_session().world_size

    outcome = check(Loop(synced=2, inside=note), [script], first=(1, 2))
    assert outcome.told == [] and worlds[6] == len(outcome.groups[-1])


def test_a_checkpoint_that_lacks_them_says_so(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[dict[str, Any]] = []

    def save(step: int) -> None:
        if step == 5 and current_session().rank == 0:
            kept.append(copy.deepcopy(current_session().states.capture()))

    run_job(Loop(synced=EVERY, inside=save), first=(1, 2))
    session_of(kept[0])
    Loop(synced=EVERY)()
    assert [each for each in caplog.messages if "gradients of 2 steps are lost" in each]


# -- gradients that nobody wants -----------------------------------------------------------------------------------


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_is_left_behind_the_step_costs_nothing(set_to_none: bool, no_sync: bool) -> None:
    carried: list[int] = []
    worlds: dict[int, int] = {}

    def loop() -> Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        session = current_session()
        for _ in er.remaining_epochs_until(EPOCHS):
            for (x,) in er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3):
                worlds[session.progress.steps] = session.world_size
                loss = wrapped(x).square().mean()
                optimizer.zero_grad(set_to_none=set_to_none)
                loss.backward()
                optimizer.step()
                with wrapped.no_sync() if no_sync else nullcontext():
                    wrapped(x).sum().backward()  # as a GAN's generator does to its discriminator
                carried.append(len(session.states.capture()["optimizer/0"]["carried"]))
        return weights(model)

    run_job(loop, [Change(5, (1, 2, 3))], first=(1, 2))
    assert worlds[5] == 2 and worlds[6] == 3
    carried.clear()
    run_job(loop)
    assert carried == [2] + [0] * (STEPS - 1)


# -- another time, another process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [4, 5, 6, 7])
def test_job_that_is_preempted_in_middle_continues_with_them(at: int, tmp_path: Path) -> None:
    wanted = trained_by_torch()
    session = session_of()
    saver = StateSaver(session, RunStorage(str(tmp_path)), lambda saved: 1e5, keep=2, interval_s=None)

    def preempt(step: int) -> None:
        if step == at:
            session.membership.post(StopJob(save=True))

    with pytest.raises(WorkerDismissed):
        Loop(inside=preempt)()
    assert saver.save() == ""
    (state,) = state_files(RunStorage(str(tmp_path)))
    session_of(open_checkpoint(RunStorage(str(tmp_path)), state))
    torch.testing.assert_close(Loop()(), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("at", [4, 6])
def test_worker_that_ran_out_of_memory_continues_with_them(at: int) -> None:
    wanted = trained_by_torch()
    session = session_of()

    def starve(step: int) -> None:
        if step == at:
            raise MemoryError

    with pytest.raises(MemoryError):
        Loop(inside=starve)()
    kept = session.keep_state()
    assert kept is not None
    session_of(kept[0])
    torch.testing.assert_close(Loop()(), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("every", "zero"), [(1, True), (2, False), (2, True)])
def test_that_micro_batches_are_accumulated_beside_it_is_told(
    caplog: pytest.LogCaptureFixture, every: int, zero: bool
) -> None:
    session_of()
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH)
    loader.autoscale_batch_size(BATCH, local_bsz_bounds=(1, BATCH // 2), gradient_accumulation=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = er.AdaptiveDataParallel(model, optimizer)
    for _epoch in er.remaining_epochs_until(1):
        for number, (x,) in enumerate(loader):
            if zero:
                optimizer.zero_grad()
            parallel(x).square().mean().backward()
            if (number // 2 + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert sum("count more than once" in record.message for record in caplog.records) == int(every == 2 and not zero)
