"""A run that is preempted, saved, and continues in another process's session: as if nothing had happened. No Ray."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train.v2.api.config import ScalingConfig

import elastic_ray as er
from elastic_ray.checkpoints.automatic import StateFile, state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.reading import open_checkpoint
from elastic_ray.consensus.consensus import AgreedChanges
from elastic_ray.loop.api import current_session
from elastic_ray.membership.messages import StopJob
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.record.record import JobRecord
from elastic_ray.run.current import WorkerDismissed
from elastic_ray.session.session import Session
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.worker.messages import WorkerReport
from elastic_ray.worker.state_saver import StateSaver
from tests.loop.alone import session_of

EPOCHS = 2
TICKS = EPOCHS * (4 + 2 + 1)  # batches of training and evaluation, and one that a break ends


def loop(heard: list[tuple[str, int, list[int]]]) -> torch.Tensor:
    """Training, evaluation and a pass left early, each epoch; returns parameters, rate and number of reports."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12)
    )
    model: Any = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model = er.AdaptiveDataParallel(model, optimizer, lr_scheduler=scheduler)
    training = er.AdaptiveDataLoader(data, batch_size=3, shuffle=True)
    held_out = er.AdaptiveDataLoader(data, batch_size=6, shuffle=False)
    for epoch in er.remaining_epochs_until(EPOCHS):
        losses = er.Accumulator()
        for x, index in training:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses["loss"] += loss.item()
            heard.append(("train", epoch, index.tolist()))
        for _, index in held_out:
            losses["seen"] += len(index)
            heard.append(("test", epoch, index.tolist()))
        for _, index in held_out:
            heard.append(("look", epoch, index.tolist()))
            break
        scheduler.step()
        er.report({"loss": losses["loss"]})
        heard.append(("sums", epoch, [round(losses["loss"] * 1e6), int(losses["seen"])]))
    done = torch.tensor([scheduler.get_last_lr()[0], float(current_session().progress.reports)])
    return torch.cat([*(each.detach().flatten() for each in model.parameters()), done])


class Heard(list[Any]):
    """Asks for the preemption when so much was heard."""

    def __init__(self, at: int, session: Session) -> None:
        super().__init__()
        self._at, self._session = at, session

    def append(self, each: Any) -> None:
        super().append(each)
        if len(self) == self._at:
            self._session.membership.post(StopJob(save=True))


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("at", range(1, TICKS + EPOCHS))
def test_nothing_is_lost_and_nothing_done_twice(at: int, tmp_path: Path) -> None:
    whole: list[Any] = []
    session_of()
    wanted = loop(whole)

    session = session_of()
    saver = StateSaver(session, RunStorage(str(tmp_path)), lambda saved: 1e5, keep=2, interval_s=None)
    first = Heard(at, session)
    with pytest.raises(WorkerDismissed):
        loop(first)
    assert session.preempted and saver.save() == ""
    (state,) = state_files(RunStorage(str(tmp_path)))
    if at <= 4:  # still in the first pass: whoever continues must not be more workers than there are samples
        assert state.resume_point.samples_left == 12 - 3 * at
    kept = open_checkpoint(RunStorage(str(tmp_path)), state)

    second: list[Any] = []
    session_of(kept)
    trained = loop(second)
    assert torch.equal(trained, wanted)
    assert [each for each in first + second if each[0] != "sums"] == [each for each in whole if each[0] != "sums"]
    sums = {epoch: values for kind, epoch, values in [*first, *second] if kind == "sums"}
    assert sums == {epoch: values for kind, epoch, values in whole if kind == "sums"}


def test_one_told_rank_suffices_and_final_stop_counts_more() -> None:
    agreement = AgreedChanges(session_of().membership)
    agreement.conclude([0, 0, 0, 0, 0, 1, 0, 0, 0, 0], world_size=3)
    assert agreement.preempted and not agreement.stop
    agreement.conclude([0, 0, 1, 0, 0, 0, 4, 0, 0, 0], world_size=3)
    assert agreement.preempted and agreement.stop and agreement.reports == 4


def test_who_waits_for_cure_is_not_woken_by_preemption() -> None:
    membership = session_of().membership
    membership.post(StopJob(save=True))
    begin_s = time.monotonic()
    with pytest.raises(LostGroupError):
        membership.await_next(timeout_s=0.3)
    assert time.monotonic() - begin_s >= 0.3
    membership.post(StopJob())
    with pytest.raises(LostGroupError):
        membership.await_next(timeout_s=60.0)


def test_of_as_many_steps_the_later_save_is_further(tmp_path: Path) -> None:
    """A checkpoint that the loop reports between training and evaluation, a preemption in the evaluation."""
    spec = er.ElasticTrainer(loop, scaling_config=ScalingConfig(num_workers=1)).spec()
    record = JobRecord(spec)
    point = ResumePoint(epoch=1, steps=4)
    state = StateFile(path="state", size=1, sha256="", resume_point=ResumePoint(epoch=0, steps=4))
    record.saved(state)
    record.report(
        WorkerReport(worker="w1", index=1, metrics={}, checkpoint=str(tmp_path / "reported"), resume_point=point)
    )
    assert record.resume_point == point, "what was reported after it is further"
    record.saved(state)
    assert record.resume_point == state.resume_point


def test_record_forgets_states_of_a_course_that_was_left(tmp_path: Path) -> None:
    """The one at 100 was corrupt: the job continued from 90, and its file is deleted with the next save."""
    spec = er.ElasticTrainer(loop, scaling_config=ScalingConfig(num_workers=1)).spec()
    record = JobRecord(spec)
    for steps in (90, 100, 92):
        record.saved(StateFile(path=str(steps), size=1, sha256="", resume_point=ResumePoint(epoch=0, steps=steps)))
    assert [state.steps for state in record.states] == [92, 90]
