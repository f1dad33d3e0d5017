"""Rank 0's account of its steps: they are of the group that it names, also where it leaves."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.batch.reports import StepReport
from elastic_ray.loop.api import current_session
from elastic_ray.parallel.flops import TrainingFlops
from elastic_ray.run.current import WorkerDismissed
from tests.loop.changing import Change, Kill, run_job


def test_left_groups_steps_are_not_told_of_the_next() -> None:
    last: list[StepReport | None] = []

    def train() -> int:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(96, 1)), batch_size=8)
        try:
            for _ in er.remaining_epochs_until(1):
                for (x,) in loader:
                    optimizer.zero_grad()
                    wrapped(x).square().mean().backward()
                    optimizer.step()
        except WorkerDismissed:
            last.append(current_session().step_report())
            raise
        return current_session().step_report().steps

    outcome = run_job(train, [Change(6, (2,))], first=(1, 2))
    assert [(report.replicas, report.steps) for report in last if report is not None] == [(1, 0)]
    assert 0 < outcome.results[2] <= 3, "of the last six steps, but for the first and two that warm up"


def test_it_has_the_loss_that_the_loop_reported_last() -> None:
    heard: list[tuple[int, float] | None] = []

    def train() -> None:
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=8)
        for epoch in er.remaining_epochs_until(4):
            for _ in loader:
                pass
            er.report({"loss": 0.5 - epoch} if epoch % 2 else {"accuracy": 0.9, "loss": "unknown"})
            report = current_session().step_report()
            heard.append(report.loss if report is not None else None)

    run_job(train)
    assert heard == [None, (2, -0.5), (2, -0.5), (4, -2.5)]


def test_it_has_models_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.parallel.wrapper.flops_on", lambda _: TrainingFlops(1e9))
    used: list[tuple[float, float]] = []

    def train() -> None:
        models = [torch.nn.Linear(width, width, bias=False) for width in (10, 20)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in models]
        small, large = map(er.AdaptiveDataParallel, models, optimizers)
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(96, 20)), batch_size=8)
        for _ in er.remaining_epochs_until(1):
            for (x,) in loader:
                (small(x[:, :10]).square().mean() + large(x).square().mean() + large(-x).square().mean()).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        report = current_session().step_report()
        assert report is not None and report.mfu is not None
        used.append((report.mfu, report.step_time))

    run_job(train)
    ((mfu, step_s),) = used
    operations = 8 * 2 * 2 * (10 * 10 + 2 * 20 * 20)  # forward, and of the gradients of weights as many
    assert mfu == pytest.approx(operations / 1e9 / step_s)


@pytest.mark.parametrize(
    ("worker", "moment"),
    [(worker, moment) for worker in (1, 3) for moment in ("backward", "allreduce", "optimizer_step", "edge")],
)
def test_reports_of_a_step_drawn_again_count_once(worker: int, moment: str) -> None:
    def train() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(60, 1)), batch_size=12)
        for _ in er.remaining_epochs_until(2):
            for (x,) in loader:
                step = current_session().ledger.step
                assert step is not None
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
                er.report({"position": step.loader_pass.position})

    outcome = run_job(train, [Kill(2, worker, moment, joins=(4,))], first=(1, 2, 3))
    assert [outcome.reports[each]["position"] for each in sorted(outcome.reports)] == [*range(0, 60, 12)] * 2


def test_unplain_report_that_rank_zero_missed_is_told() -> None:
    """Worker 1 dies before it reports the third step; worker 2, the next rank 0, has something else there."""

    def train() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(60, 1)), batch_size=12)
        for _ in er.remaining_epochs_until(1):
            for (x,) in loader:
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
                er.report({"loss": 1.0 if er.get_context().get_world_rank() == 0 else object()})

    outcome = run_job(train, [Kill(2, 1, "optimizer_step")], first=(1, 2))
    assert sorted(outcome.reports) == [1, 2, 4, 5]
    (told,) = [text for kind, text, _ in outcome.told if kind == "warning"]
    assert "report 3 is missing if rank 0 was lost before it" in told and "object" in told


def test_kept_reports_hold_no_activations() -> None:
    alive: list[Any] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.activation = Activation()
            alive.append(weakref.ref(ctx.activation))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    def train() -> int:
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=8)
        for _ in er.remaining_epochs_until(3):
            for (x,) in loader:
                er.report({"loss": Watched.apply(x.requires_grad_()).sum()})
        gc.collect()
        return sum(each() is not None for each in alive)

    assert set(run_job(train, [], first=(1, 2)).results.values()) == {0}


class Activation:
    """Something large that a graph holds."""
