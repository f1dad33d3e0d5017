"""Changes of group and batch of a worker with real groups, whose controller is the test: it records and answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import Communicator
from elastic_ray.membership.messages import BatchProposal, Cancel, GenerationSpec, StopJob
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.run.current import WorkerDismissed, session_of_thread
from elastic_ray.run.registry import HookPoint
from elastic_ray.state.resume_point import SavedState
from tests.loop.changing import Change, Kill, run_job
from tests.loop.trainee import Trainee, numbers
from tests.membership.groups import local_controller, member
from tests.session.worker import WAIT_S, Worker, group

SHAPE, OTHER = BatchChoice(atomic_bsz=4), BatchChoice(atomic_bsz=8, accum_steps=1)


def test_a_worker_joins_with_its_generations_batch() -> None:
    worker = Worker(group(1, batch=SHAPE))
    assert worker.train() == 4
    assert (worker.controller.entered, worker.controller.failures) == ([1], [])
    assert worker.shapes == [SHAPE] and worker.session.states.shape == SHAPE


def test_an_agreed_batch_is_set_once_and_where_different() -> None:
    worker = Worker(group(1, batch=SHAPE))
    propose = worker.post(BatchProposal(generation=1, batch=OTHER))
    assert worker.train({0: worker.post(BatchProposal(generation=1, batch=SHAPE)), 1: propose, 2: propose}) == 4
    assert worker.shapes == [SHAPE, OTHER]


def test_a_group_comes_with_its_own_batch() -> None:
    worker = Worker(group(1, batch=SHAPE))
    larger = BatchProposal(generation=1, batch=BatchChoice(atomic_bsz=16))
    assert worker.train({1: worker.post(larger, group(2, batch=OTHER))}) == 4
    assert (worker.controller.entered, worker.controller.failures) == ([1, 2], [])
    assert worker.session.states.shape == OTHER and BatchChoice(atomic_bsz=16) not in worker.shapes


@pytest.mark.parametrize(
    ("message", "stopped"), [(StopJob(), True), (StopJob(save=True), True), (group(2, "another"), False)]
)
def test_who_leaves_is_dismissed_at_the_steps_end(message: Any, stopped: bool) -> None:
    worker = Worker()
    between: list[int] = []
    worker.session.registry.add_hook(HookPoint.BETWEEN_STEPS, lambda: between.append(1))
    with pytest.raises(WorkerDismissed) as dismissed:
        worker.train({1: worker.post(message)})
    assert dismissed.value.stopped is stopped and worker.session.progress.loader_steps == 2
    assert len(between) == (1 if stopped else 2), "who stops does nothing else"
    assert worker.session.preempted is (message == StopJob(save=True))


def test_a_policys_batch_goes_before_the_jobs() -> None:
    worker = Worker(group(1, batch=SHAPE))
    worker.session.add_policies([er.adaptation.BatchSchedule({0: 6})])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    deliver = worker.post(BatchProposal(generation=1, batch=OTHER))
    loader = er.AdaptiveDataLoader(TensorDataset(torch.ones(48, 1)), batch_size=3)
    loader.autoscale_batch_size(max_batch_size=24)
    for _ in er.remaining_epochs_until(1):
        for (x,) in loader:
            if worker.session.progress.loader_steps == 2:
                deliver()
            optimizer.zero_grad()
            wrapped(x).sum().backward()
            optimizer.step()
    # From the first step on: what similar jobs did best with is no start for a schedule.
    assert worker.shapes[0] == BatchChoice(atomic_bsz=3)
    assert set(worker.shapes[1:]) == {BatchChoice(atomic_bsz=6)}


def test_a_generation_called_off_after_agreement_is_replaced() -> None:
    worker = Worker()

    def call_off() -> None:
        if worker.session.run.agreed.generation == 2:
            worker.post(Cancel(generation=2))()

    worker.session.registry.add_hook(HookPoint.BETWEEN_STEPS, call_off)
    worker.controller.answers = [group(3, void_below=3)]
    assert worker.train({1: worker.post(group(2))}) == 4
    ((left, cause),) = worker.controller.failures
    assert left == 2 and "called off after it was agreed on" in cause and worker.controller.entered == [1, 3]


def test_a_group_called_off_between_steps_is_left() -> None:
    worker = Worker()
    following = worker.post(group(2, void_below=2))
    worker.session.registry.add_hook(
        HookPoint.BETWEEN_STEPS, lambda: following() if worker.session.progress.loader_steps == 2 else None
    )
    assert worker.train() == 4
    assert worker.controller.failures == [(1, "the group was called off")] and worker.controller.entered == [1, 2]


@pytest.mark.parametrize("stops", [True, False])
def test_who_finds_no_group_ends_as_the_job_does(stops: bool) -> None:
    worker = Worker(regroup_timeout_s=0.05)
    worker.controller.answers = [StopJob()] if stops else []
    ends: Any = WorkerDismissed if stops else LostGroupError
    with pytest.raises(ends) as ended:
        worker.train({1: worker.post(group(2, void_below=2), group(3, "0", void_below=2), Cancel(generation=3))})
    assert not stops or (isinstance(ended.value, WorkerDismissed) and ended.value.stopped)


def with_gone_peer(
    controller: Any, gone: Callable[[], None] = lambda: None
) -> Callable[[GenerationSpec, int], Communicator]:
    """Forms generation 1 with another rank, which is gone at once, and further ones alone."""

    def form(spec: GenerationSpec, rank: int) -> Communicator:
        options = {"generation": spec.generation, "timeout_s": WAIT_S, "form_s": WAIT_S}
        if spec.world_size == 1:
            return member(controller, 0, 1, **options)
        with ThreadPoolExecutor() as pool:
            other = pool.submit(member, controller, 1 - rank, 2, **options)
            own = member(controller, rank, 2, **options)
            other.result().close()
        gone()
        return own

    return form


@pytest.mark.parametrize("kept", [True, False])
def test_sole_holder_of_state_reports_a_broken_group(kept: bool) -> None:
    before = Worker()
    before.train()
    saved = SavedState(states=before.session.keep_state()[0]) if kept else None
    with local_controller() as controller:

        def gone() -> None:
            if not kept:  # the job finds out without it
                Timer(0.3, worker.membership.post, [group(2, void_below=2)]).start()

        worker = Worker(group(1, "0", "another"), with_gone_peer(controller, gone), saved=saved)
        worker.controller.answers = [group(2, void_below=2)]
        assert worker.train() == 4
    assert [number for number, _ in worker.controller.failures] == [1] * kept and worker.controller.entered == [2]


def test_who_cannot_enter_an_unchanging_group_says_why() -> None:
    with local_controller() as controller:
        form = with_gone_peer(controller)
        worker = Worker(group(1, "0", "another"), form, elastic=False, explain=lambda cause: "rank 1 is gone")
        with pytest.raises(LostGroupError, match=r"^rank 1 is gone$"):
            worker.train()


def trained() -> tuple[list[int], float]:
    """Two epochs of four steps: the number of ranks in each, and the weight in the end."""
    ranks: list[int] = []
    session, trainee = session_of_thread(), Trainee()
    session.registry.add_hook(HookPoint.BETWEEN_STEPS, lambda: session.moment("between"))
    loader = er.AdaptiveDataLoader(numbers(12), batch_size=3)
    for _ in er.remaining_epochs_until(2):
        for (x,) in loader:
            del ranks[session.progress.steps :]  # a step that is drawn again
            ranks.append(session.world_size)
            trainee.train(x)
    return ranks, trainee.state()[0]


@pytest.mark.parametrize(
    ("script", "first", "ranks"),
    [
        ([Change(2, (1, 2, 3)), Kill(3, 2, "between")], (1, 2), [2] * 8),
        ([Kill(1, 3, "edge", last=True), Kill(2, 2, "receiving")], (1, 2, 3), [3, 3, 1, 1, 1, 1, 1, 1]),
    ],
    ids=["when it is agreed on", "while it is entered"],
)
def test_a_loss_during_a_change_loses_no_step(script: list[Any], first: tuple[int, ...], ranks: list[int]) -> None:
    alone = run_job(trained).results[1][1]
    assert run_job(trained, script, first=first).results[1] == (ranks, pytest.approx(alone, abs=1e-7))


def test_a_group_larger_than_the_rest_awaits_the_pass() -> None:
    ranks, _ = run_job(trained, [Change(3, (1, 2, 3, 4))], first=(1,)).results[1]
    assert ranks == [1, 1, 1, 1, 4, 4, 4]
