"""Ranks that are one collective apart when their group breaks: one lacks a result that the others have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.sync import LocalSGD
from tests.loop.changing import Outcome
from tests.loop.small_net import net, weights
from tests.loop.torn import Tear, run_torn

Result = tuple[Tensor, int, int, list[float]]
BATCH = 6


def rows(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 5, generator=generator, dtype=torch.float64))


class Program:
    """A net, its update, and loaders."""

    def __init__(self, **options: Any) -> None:
        self.net = net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.model: Any = er.AdaptiveDataParallel(
            self.net, self.optimizer, self.schedule, scaling_rule="none", **options
        )
        self.outer, self.inner, self.third = (
            er.AdaptiveDataLoader(rows(2 * BATCH, seed), batch_size=BATCH, seed=seed) for seed in (1, 2, 3)
        )

    def update(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()

    def result(self, sums: er.Accumulator) -> Result:
        steps = er.get_context().get_global_step()
        return weights(self.net).clone(), steps, self.schedule.last_epoch, [sums[name] for name in sorted(sums)]


def plain() -> Result:
    run = Program()
    for _ in er.remaining_epochs_until(2):
        sums = er.Accumulator()
        for (x,) in run.outer:
            run.update(x)
            sums["samples"] += len(x)
    return run.result(sums)


def evaluates_within() -> Result:
    run = Program()
    for _ in er.remaining_epochs_until(1):
        sums = er.Accumulator()
        for (x,) in run.outer:
            run.update(x)
            for (other,) in run.inner:
                sums["evaluated"] += len(other)
            sums["trained"] += len(x)
    return run.result(sums)


def trains_within() -> Result:
    run = Program()
    for _ in er.remaining_epochs_until(1):
        sums = er.Accumulator()
        for (x,) in run.outer:
            run.update(x)
            for (other,) in run.inner:
                run.update(other)
                sums["inner"] += len(other)
            sums["outer"] += len(x)
    return run.result(sums)


def trains_around() -> Result:
    """A nested training, the step's own update, and another one."""
    run = Program()
    for _ in er.remaining_epochs_until(1):
        sums = er.Accumulator()
        for (x,) in run.outer:
            for (other,) in run.inner:
                run.update(other)
            run.update(x)
            for (other,) in run.third:
                run.update(other)
            sums["outer"] += len(x)
    return run.result(sums)


def evaluates_around() -> Result:
    """An evaluation, the step's own update, and another evaluation."""
    run = Program()
    for _ in er.remaining_epochs_until(1):
        sums = er.Accumulator()
        for (x,) in run.outer:
            for (other,) in run.inner:
                sums["before"] += len(other)
            run.update(x)
            for (other,) in run.third:
                sums["after"] += len(other)
            sums["trained"] += len(x)
    return run.result(sums)


def averages() -> Result:
    """Each rank by itself in rounds of two steps, and in the evaluation after them."""
    run = Program(strategy=LocalSGD(period=2))
    for _ in er.remaining_epochs_until(2):
        sums = er.Accumulator()
        for (x,) in run.outer:
            run.update(x)
            sums["trained"] += len(x)
        for (x,) in run.inner:
            sums["evaluated"] += len(x)
    return run.result(sums)


def leaves() -> Result:
    run = Program()
    for _ in er.remaining_epochs_until(2):
        sums = er.Accumulator()
        for (x,) in run.outer:
            run.update(x)
            sums["samples"] += len(x)
            break
        sums.values()
    return run.result(sums)


def reports(*, adds: bool) -> None:
    """A step that ends with a report, with a vote if ``adds``, and an evaluation within it."""
    run = Program()
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(rows(BATCH, 1), batch_size=BATCH):
            run.update(x)
            evaluated = er.Accumulator() if adds else {"samples": 0}
            for (other,) in run.inner:
                evaluated["samples"] += len(other)
            er.report({"samples": evaluated["samples"]} if adds else {})


def proofs(outcome: Outcome) -> set[Any]:
    """Which samples each pass has used; a rank that is alone at the end of all proves it anew."""
    facts = [detail["proof"] for _, _, detail in outcome.passes]
    return {(each["epoch"], each["samples"], each["hash"]) for each in facts}


def check(train: Callable[[], Result], *, joins: tuple[int, ...] = ()) -> None:
    """Each of worker 2's waits fails in turn, and worker 1 dies then: nothing changes but rounding."""
    near = 1.0 if train is averages else 1e-9  # means of models depend on how many there are
    counted = Tear(wait=1 << 20)
    calm = run_torn(train, counted)
    wanted = calm.results[1]
    for wait in range(counted.waits[2] - 1):  # the last is in vain: all have returned
        found = run_torn(train, Tear(wait=wait, joins=joins))
        assert len(found.groups) > 1, f"wait {wait}"
        for own in found.results.values():
            assert torch.equal(own[0], found.results[2][0]), f"wait {wait}"
            torch.testing.assert_close(own[0], wanted[0], rtol=0, atol=near, msg=f"wait {wait}")
            assert own[1:] == wanted[1:], f"wait {wait}"
        assert proofs(found) == proofs(calm), f"wait {wait}"


def check_left(train: Callable[[], Result]) -> None:
    """The same for a loop that is left, whose lost step cannot be drawn again: all know the same of it."""
    counted = Tear(wait=1 << 20)
    run_torn(train, counted)
    for wait in range(counted.waits[2] - 1):
        own, *others = run_torn(train, Tear(wait=wait)).results.values()
        for other in others:
            assert torch.equal(own[0], other[0]) and own[1:] == other[1:], f"wait {wait}"


PROGRAMS = [plain, evaluates_within, trains_within, evaluates_around, trains_around, averages]


@pytest.mark.thorough
@pytest.mark.parametrize("adds", [True, False])
def test_reports_of_a_left_step_count_once(adds: bool) -> None:
    train = functools.partial(reports, adds=adds)
    counted = Tear(wait=1 << 20)
    calm = run_torn(train, counted)
    for wait in range(counted.waits[2] - 1):
        assert run_torn(train, Tear(wait=wait)).reports == calm.reports, f"wait {wait}"


@pytest.mark.thorough
@pytest.mark.parametrize("joins", [(), (4,)])
@pytest.mark.parametrize("train", PROGRAMS)
def test_result_that_one_lacks_when_another_dies(train: Callable[[], Result], joins: tuple[int, ...]) -> None:
    check(train, joins=joins)


@pytest.mark.thorough
def test_result_that_one_lacks_when_a_loop_is_left() -> None:
    check_left(leaves)
