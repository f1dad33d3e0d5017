"""Rounds in which ranks are late: others make their steps, each sample is used once, and schedules stay together."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.data.order import IndexOrder
from elastic_ray.loop.api import current_session
from elastic_ray.state.progress import BITS, RunProgress, sample_hashes
from elastic_ray.state.shared_state import SharedState
from elastic_ray.sync import DiLoCo, LocalSGD, PairAveraging
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.sync.drifting import weights

SAMPLES, BATCH, EPOCHS, PERIOD = 144, 6, 2, 8


def line() -> nn.Linear:
    """The same model on each worker; torch's own generator belongs to all threads."""
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def rows() -> Tensor:
    return torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(7))


class Pace:
    """What steps take: those of the late worker as long as several of each other one, on a busy machine, too."""

    SEVERAL, STEP_S = 3, 0.003

    def __init__(self, late: str = "w2", longest_s: float = 0.5) -> None:
        self._late, self._made = late, Counter[str]()
        self.longest_s = longest_s  # of a step: the others may have none left to make

    def step(self) -> None:
        worker = current_session().worker
        self._made[worker] += 1
        if worker != self._late:
            time.sleep(self.STEP_S)  # a step
            return
        began_s, before = time.monotonic(), self._made.copy()
        others = [each for each in before if each != worker]
        while (took_s := time.monotonic() - began_s) < self.longest_s:
            if took_s > 10 * self.STEP_S and all(self._made[each] >= before[each] + self.SEVERAL for each in others):
                break
            time.sleep(0.001)


class Late:
    """A train loop in which one worker's steps take longer."""

    def __init__(self, strategy: Any, workers: int = 0, longest_s: float = 0.5) -> None:
        self._strategy, self._workers, self._pace = strategy, workers, Pace(longest_s=longest_s)

    def __call__(self) -> tuple[Tensor, list[list[int]], list[float], int]:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
        wrapped = er.AdaptiveDataParallel(model, optimizer, lr_scheduler=schedule, strategy=self._strategy)
        data = torch.utils.data.TensorDataset(rows(), torch.arange(SAMPLES))
        loader = er.AdaptiveDataLoader(data, batch_size=BATCH, seed=3, num_workers=self._workers)
        seen: list[list[int]] = []
        rates: list[float] = []
        for _ in er.remaining_epochs_until(EPOCHS):
            for x, numbers in loader:
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
                schedule.step()
                self._pace.step()
                seen.append(numbers.tolist())
            rates.append(schedule.get_last_lr()[0])
        return weights(model), seen, rates, current_session().progress.steps


def check(outcome: Outcome) -> None:
    """One model, one schedule, and each sample once an epoch."""
    found = list(outcome.results.values())
    assert all(torch.equal(model, found[0][0]) for model, *_ in found)
    assert {steps for *_, steps in found} == {SAMPLES // BATCH * EPOCHS}
    wanted = [0.1 * 0.99 ** (SAMPLES // BATCH * epoch) for epoch in range(1, EPOCHS + 1)]
    for *_, rates, _ in found:
        assert rates[-len(wanted) :] == pytest.approx(wanted[-len(rates) :])
    for epoch, (_, _, detail) in enumerate(outcome.passes):
        order = IndexOrder(samples=SAMPLES).epoch_order(3, epoch)
        assert detail["proof"]["hash"] == int(sample_hashes(order[:]).sum()) & BITS
    assert len(outcome.passes) == EPOCHS and outcome.told == []


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("make", [LocalSGD, DiLoCo, PairAveraging])
def test_others_make_the_steps_of_a_late_rank(make: Any) -> None:
    outcome = run_job(Late(make(period=PERIOD, give_back=True)), [], first=(1, 2, 3))
    check(outcome)
    made = {worker: len(seen) for worker, (_, seen, *_) in outcome.results.items()}
    assert made[2] < SAMPLES // BATCH * EPOCHS * 0.7 < min(made[1], made[3]), made
    used = sorted(sample for _, seen, *_ in outcome.results.values() for step in seen for sample in step)
    assert used == sorted(list(range(SAMPLES)) * EPOCHS)


def test_none_is_given_back_where_it_is_not_wanted() -> None:
    outcome = run_job(Late(LocalSGD(period=PERIOD), longest_s=0.03), [], first=(1, 2, 3))
    check(outcome)
    assert {len(seen) for _, seen, *_ in outcome.results.values()} == {SAMPLES // BATCH * EPOCHS}


def test_none_is_given_back_where_worker_processes_load() -> None:
    outcome = run_job(Late(LocalSGD(period=PERIOD, give_back=True), workers=1, longest_s=0.03), [], first=(1, 2))
    check(outcome)
    assert {len(seen) for _, seen, *_ in outcome.results.values()} == {SAMPLES // BATCH * EPOCHS}


@pytest.mark.thorough
def test_none_is_given_back_once_the_strategy_says_so() -> None:
    pace = Pace()

    def train() -> list[int]:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=LocalSGD(period=PERIOD, give_back=True))
        loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH)
        made = []
        for epoch in er.remaining_epochs_until(4):
            if epoch == 2:  # takes effect after a step or a round
                wrapped.set_strategy(LocalSGD(period=PERIOD))
                pace.longest_s = 0.03
            made.append(0)
            for x in loader:
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
                pace.step()
                made[-1] += 1
        return made

    outcome = run_job(train, [], first=(1, 2))
    first, second = outcome.results[1], outcome.results[2]
    assert second[1] < first[1] and first[3] == second[3] == SAMPLES // BATCH


def test_a_model_is_evaluated_over_the_training_loader() -> None:
    def train() -> list[int]:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=LocalSGD(period=PERIOD, give_back=True))
        loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH)
        made = []
        for _ in er.remaining_epochs_until(2):
            wrapped.train()
            for x in loader:
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
            wrapped.eval()
            made.append(0)
            with torch.no_grad():
                for x in loader:
                    wrapped(x)
                    # one worker is late
                    time.sleep(0.02 if current_session().worker == "w2" else 0.002)
                    made[-1] += 1
        return made

    outcome = run_job(train, [], first=(1, 2))
    assert list(outcome.results.values()) == [[SAMPLES // BATCH] * 2] * 2


@pytest.mark.parametrize("meet", ["loader", "all_reduce"])
def test_what_waits_for_others_is_refused_within_rounds(meet: str) -> None:
    def train() -> None:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        er.AdaptiveDataParallel(model, optimizer, strategy=LocalSGD(period=PERIOD))
        loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH)
        others = er.AdaptiveDataLoader(rows(), batch_size=BATCH)
        for _ in er.remaining_epochs_until(1):
            for _ in loader:
                if meet == "loader":
                    next(iter(others))
                else:
                    er.all_reduce(1.0)

    with pytest.raises(RuntimeError, match="averages models every 8 steps: each rank makes these steps by itself"):
        run_job(train, [], first=(1, 2))


def test_sums_that_each_step_makes_are_refused() -> None:
    """Ranks make unequally many steps, and their Accumulators would have unlike numbers."""

    def train() -> None:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=LocalSGD(period=4, give_back=True))
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(rows()), batch_size=4)
        for _ in er.remaining_epochs_until(1):
            for x in loader:
                totals = er.Accumulator()
                optimizer.zero_grad()
                loss = wrapped(x[0]).square().mean()
                loss.backward()
                optimizer.step()
                totals["loss"] += loss.item()

    with pytest.raises(RuntimeError, match=r"an Accumulator must be made before the loop over the training data"):
        run_job(train, first=(1, 2))


def test_memory_that_ran_out_stays_known_after_a_round() -> None:
    state = SharedState(RunProgress())
    state.start_round()
    state.progress.commit_training(1.0)
    state.progress.bound_memory(8)
    state.lose_round()
    assert (state.progress.steps, state.progress.memory_bound) == (0, 4)


def test_a_break_within_a_round_ends_all_ranks() -> None:
    def train() -> tuple[int, Tensor]:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=LocalSGD(period=PERIOD, give_back=True))
        loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH)
        for _ in er.remaining_epochs_until(1):
            for x in loader:
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
                # one worker is late
                time.sleep(0.03 if current_session().worker == "w2" else 0.003)
                if er.get_context().get_global_step() >= PERIOD + 3:
                    break
        return current_session().progress.steps, model.weight.detach()

    outcome = run_job(train, [], first=(1, 2, 3))
    assert {steps for steps, _ in outcome.results.values()} == {2 * PERIOD}
    assert outcome.passes == [], "which samples were used is not known"
    assert outcome.told == []


def test_a_break_loses_nothing_of_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.communication.round_shares._CHEAP", 0.0)  # ranks ask ahead

    def train() -> list[list[int]]:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=LocalSGD(period=PERIOD, give_back=True))
        data = torch.utils.data.TensorDataset(rows(), torch.arange(SAMPLES))
        loader = er.AdaptiveDataLoader(data, batch_size=BATCH)
        seen: list[list[int]] = []
        for epoch in er.remaining_epochs_until(2):
            for x, numbers in loader:
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
                if epoch:
                    seen.append(numbers.tolist())
                elif er.get_context().get_global_step() >= PERIOD + 3:
                    break  # sooner than the next step was to be counted
                time.sleep(0.03)  # each step
        return seen

    outcome = run_job(train, [], first=(1, 2))
    used = sorted(sample for seen in outcome.results.values() for step in seen for sample in step)
    assert used == list(range(SAMPLES))
    assert outcome.told == []


@pytest.mark.slow  # a scripted kill leaves gloo threads behind in this process
@pytest.mark.parametrize("dies", [1, 2, 3])
@pytest.mark.parametrize("moment", ["backward", "after_step", "edge"])
def test_workers_come_leave_and_die(dies: int, moment: str) -> None:
    script = [Change(5, (1, 2, 3, 4)), Kill(19, dies, moment)]
    check(run_job(Late(LocalSGD(period=PERIOD, give_back=True)), script, first=(1, 2, 3)))
