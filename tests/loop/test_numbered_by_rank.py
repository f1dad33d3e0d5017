"""What ranks number by themselves has the same numbers after steps lost for some, and on workers that join."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.loop import accumulator
from elastic_ray.run.current import session_of_thread, set_session
from tests.loop.changing import Change, Kill, run_job

STEPS, THREE = 8, (1, 2, 3)
FEW = 6
_ONE = threading.Lock()


def _few() -> er.AdaptiveDataLoader:
    return er.AdaptiveDataLoader(TensorDataset(torch.ones(FEW, 2)), batch_size=3, shuffle=False)


def trained(
    within: Callable[[], Any], after: Callable[[], Any] = lambda: None, *, leaves: bool = False, late: bool = False
) -> list[Any]:
    """Train two epochs; return the results of ``within``, called in each step, and of ``after``, after each epoch.

    Args:
        leaves: leave the epoch by ``break`` in its sixth step.
        late: call ``within`` after the step's update.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    train = er.AdaptiveDataLoader(TensorDataset(torch.ones(6 * STEPS, 2)), batch_size=6)
    found = list[Any]()
    for _ in er.remaining_epochs_until(2):
        for number, (x,) in enumerate(train):
            if not late:
                found.append(within())
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            if late:
                found.append(within())
            if leaves and number == 5:
                break
        found.append(after())
    return [each for each in found if each is not None]


def evaluated(*, leaves: bool = False) -> dict[str, float]:
    """Count the samples of a new loader's pass, or of its first step."""
    total = er.Accumulator()
    for (x,) in _few():
        total["n"] += len(x)
        if leaves:
            break
    return dict(total)


@pytest.mark.parametrize(
    "script", [[Change(5, THREE)], [Kill(5, 2, "edge", last=True, joins=(4,))], [Kill(6, 2, "edge", joins=(4,))]]
)
def test_a_worker_joins_where_break_left_an_epoch(script: list[Any]) -> None:
    found = run_job(lambda: trained(lambda: None, evaluated, leaves=True), script, first=(1, 2))
    assert len(found.groups) == 2
    assert all(each == {"n": FEW} for sums in found.results.values() for each in sums)


@pytest.mark.parametrize("moment", ["forward", "edge", "end_of_pass"])
def test_a_worker_joins_where_break_left_an_evaluation(moment: str) -> None:
    """That one draws the step around it again with the others, who had left the evaluation."""
    script = [Kill(3, 2, moment, last=True, joins=(4,))]
    found = run_job(lambda: trained(lambda: evaluated(leaves=True)["n"]), script, first=THREE)
    assert found.groups == [THREE, (1, 3, 4)]
    assert {worker: len(sums) for worker, sums in found.results.items()} == {1: 17, 3: 17, 4: 13}


def test_a_worker_joins_in_an_evaluation_after_the_update() -> None:
    """That one comes by the step's backward pass first, which the others have behind them."""
    script = [Kill(3, 2, "edge", last=True, joins=(4,))]
    found = run_job(lambda: trained(lambda: evaluated()["n"], late=True), script, first=THREE)
    assert found.groups == [THREE, (1, 3, 4)]
    assert found.results[4] == [FEW] * 13
    for worker in (1, 3):
        assert [*found.results[worker][:3], *found.results[worker][4:]] == [FEW] * 16, "the fourth step is drawn again"


def test_add_after_break_counts_in_the_step_around() -> None:
    """That step is drawn again when a worker is lost at the end of the evaluation."""
    total = threading.local()

    def within() -> None:
        total.rows = getattr(total, "rows", None) or er.Accumulator()
        for _ in _few():
            break
        total.rows.add("n", 1.0)

    found = run_job(
        lambda: trained(within, lambda: total.rows["n"]), [Kill(3, 2, "end_of_pass", last=True)], first=THREE
    )
    assert found.groups == [THREE, (1, 3)]
    assert [sums[0] for sums in found.results.values()] == [3 * 3.0 + 5 * 2.0] * 2


@pytest.mark.parametrize(("evaluates", "how"), [(0, ""), (1, ""), (1, "shards"), (1, "weighs"), (1, "whole")])
def test_gradients_after_break_have_their_own_steps_weights(evaluates: int, how: str) -> None:
    def work() -> float:
        weight: Any = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(weight.weight)
        if how in ("shards", "whole"):
            er.fully_shard(weight)
        optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
        wrapped = er.AdaptiveDataParallel(weight, optimizer, scaling_rule="none")
        rows = torch.arange(6.0).reshape(6, 1)
        for _ in er.remaining_epochs_until(1):
            loader = er.AdaptiveDataLoader(rows, batch_size=6, shuffle=False)
            for x in loader:
                inner = er.AdaptiveDataLoader(
                    rows[:5], batch_size=5 - 4 * (how == "whole"), whole_batches=how == "whole"
                )
                for _ in inner if evaluates else ():
                    break
                if how == "weighs":
                    loader.weigh(3 * len(x))
                wrapped(x).mean().backward()
                optimizer.step()
        return -weight.weight.sum().item()

    found = run_job(work, first=THREE)
    assert [*found.results.values()] == [pytest.approx(2.5)] * 3


class _Counted:
    """Sums of a module that is imported before the worker has its session."""

    def __init__(self) -> None:
        session = session_of_thread()
        set_session(None)
        with _ONE:
            accumulator.NUMBERS = itertools.count(2)  # each worker is a process of its own
            self.rows, self.steps = er.Accumulator(), er.Accumulator()
        set_session(session)

    def __call__(self) -> None:
        self.rows["n"] += 1.0
        self.steps["n"] += 2.0

    def read(self) -> tuple[float, float]:
        """The sums over all ranks."""
        return float(self.rows["n"]), float(self.steps["n"])


def test_worker_joins_whose_sums_an_import_made() -> None:
    def work() -> list[Any]:
        counted = _Counted()
        return trained(counted, counted.read)

    found = run_job(work, [Change(4, THREE)], first=(1, 2))
    rows = 2.0 * 5, 2.0 * 5 + 3.0 * 3, 3.0 * STEPS
    assert {each[-1] for each in found.results.values()} == {(rows[1] + rows[2], 2 * (rows[1] + rows[2]))}
