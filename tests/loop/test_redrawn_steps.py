"""A step whose update is in the model, but whose end was lost, is drawn again with the samples of that update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import elastic_ray as er
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import Intent
from elastic_ray.loop.api import current_session
from elastic_ray.sync import LocalSGD
from tests.loop.changing import Change, Kill, run_job

SAMPLES, BATCH, WORKERS = 40, 4, (1, 2, 3)


class Stream(IterableDataset[Any]):
    """The same samples, one after the other."""

    def __iter__(self) -> Any:
        return iter([(torch.tensor(index),) for index in range(SAMPLES)])


def used(dataset: Dataset[Any], strategy: str) -> tuple[list[float], int]:
    """Train an epoch with a batch that the group's size decides; a weight for each sample says by how much it was used.

    Returns the weights, and the samples that an accumulator has counted.
    """
    model: Any = torch.nn.Embedding(SAMPLES, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    loader = er.AdaptiveDataLoader(dataset, batch_size=BATCH)
    loader.autoscale_batch_size(32, local_bsz_bounds=(1, 16))
    for _ in er.remaining_epochs_until(1):
        seen = er.Accumulator()
        for (index,) in loader:
            optimizer.zero_grad()
            wrapped(index).sum().div(len(index)).backward()
            optimizer.step()
            seen["samples"] += len(index)
    return [-float(each) for each in model.weight.detach()[:, 0]], int(seen["samples"])


@pytest.mark.parametrize("make", [lambda: TensorDataset(torch.arange(SAMPLES)), Stream], ids=["map", "stream"])
@pytest.mark.parametrize(
    ("strategy", "moment"), [("all_reduce", "after_step"), ("zero1", "after_step"), ("zero1", "publish")]
)
def test_each_sample_is_in_one_update(make: Any, strategy: str, moment: str) -> None:
    """Three workers take 6 samples a step, two take 4; one is lost when all have updated, before all agree on it."""
    script = [Change(1, WORKERS), Kill(3, 3, moment, last=True)]
    outcome = run_job(lambda: used(make(), strategy), script)
    assert outcome.groups[-1] == (1, 2)
    for weights, total in outcome.results.values():
        counts = {round(1 / weight, 3) for weight in weights}  # the last step has 2
        assert counts <= {2, 4, 6}, f"used twice, or not at all: {weights}"
        assert 6 in counts and total == SAMPLES


def with_rates(by: str) -> torch.Tensor:
    """Train with rates that the loop itself sets after each step, or a scheduler in place; return the weights."""
    model = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1) if by == "tensor" else 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if by == "tensor" else None
    wrapped = er.AdaptiveDataParallel(model, optimizer, scheduler)
    x = torch.linspace(-1, 1, 2 * SAMPLES, dtype=torch.float64).view(SAMPLES, 2)
    loader = er.AdaptiveDataLoader(TensorDataset(x), batch_size=BATCH, shuffle=False)
    for _ in er.remaining_epochs_until(1):
        for (rows,) in loader:
            optimizer.zero_grad()
            wrapped(rows).square().mean().backward()
            optimizer.step()
            for group in optimizer.param_groups if scheduler is None else ():
                group["lr"] *= 0.8
            if scheduler is not None:
                scheduler.step()
    return model.weight.detach()


@pytest.mark.parametrize("by", ["hand", "tensor"])
@pytest.mark.parametrize("moment", ["backward", "edge"])
def test_rates_that_a_lost_step_has_set_are_undone(by: str, moment: str) -> None:
    (alone,) = run_job(lambda: with_rates(by)).results.values()
    results = run_job(lambda: with_rates(by), [Kill(4, 2, moment, joins=(3,))], first=(1, 2)).results
    for weights in results.values():
        torch.testing.assert_close(weights, alone, rtol=1e-12, atol=0)


class Hooked(torch.nn.Module):
    """A net with an average of it, and buffers that hooks of the optimizer change, also by what all ranks have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1).double()
        for parameter in self.net.parameters():
            torch.nn.init.ones_(parameter)
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("seen_by_updates", torch.zeros(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += len(rows)
        return self.net(rows)

    @torch.no_grad()
    def count(self, place: int) -> None:
        self.seen_by_updates[place] += er.all_reduce(self.seen.clone())

    @torch.no_grad()
    def follow(self) -> None:
        """Decay the bias and let the average follow the weights."""
        self.net.bias *= 0.9
        self.average.weight.lerp_(self.net.weight, 0.1)
        self.seen.zero_()


def with_hooks(strategy: str, counts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Train with hooks of the optimizer; ``counts`` says in which of them ranks add up (0 before, 1 after updates)."""
    model = Hooked()
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1, momentum=0.9)
    if 0 in counts:
        optimizer.register_step_pre_hook(lambda *_: model.count(0))
    if 1 in counts:
        optimizer.register_step_post_hook(lambda *_: model.count(1))
    optimizer.register_step_post_hook(lambda *_: model.follow())
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    x = torch.linspace(-1, 1, 2 * SAMPLES, dtype=torch.float64).view(SAMPLES, 2)
    for _ in er.remaining_epochs_until(1):
        steps = er.Accumulator()
        for (rows,) in er.AdaptiveDataLoader(TensorDataset(x), batch_size=BATCH, shuffle=False):
            optimizer.zero_grad()
            wrapped(rows).square().mean().backward()
            optimizer.step()
            steps["number"] += 1  # the ranks agree at the step's end
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["all_reduce", "zero1"])
@pytest.mark.parametrize(("counts", "moment"), [((), "after_step"), ((0,), "collective"), ((1,), "collective")])
@pytest.mark.parametrize("joins", [(), (4,)])
def test_hooks_of_an_update_count_once(
    strategy: str, counts: tuple[int, ...], moment: str, joins: tuple[int, ...]
) -> None:
    """An average, buffers and a decayed bias are those of one process, wherever the step of the update is lost."""
    (alone,) = run_job(lambda: with_hooks("all_reduce", counts)).results.values()
    script = [Kill(3, 2, moment, joins=joins, last=True)]
    outcome = run_job(lambda: with_hooks(strategy, counts), script, first=WORKERS)
    assert outcome.groups[1:] == [(1, 3, *joins)]
    for found in outcome.results.values():
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0, msg=lambda text, n=name: f"{n}: {text}")


def with_held_average() -> torch.Tensor:
    """Train with an average of the net whose parameters the loop holds in a list; return what the model has of it."""
    model = Hooked()
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    averages = list(model.average.parameters())
    x = torch.linspace(-1, 1, 2 * SAMPLES, dtype=torch.float64).view(SAMPLES, 2)
    for _ in er.remaining_epochs_until(1):
        for (rows,) in er.AdaptiveDataLoader(TensorDataset(x), batch_size=BATCH, shuffle=False):
            optimizer.zero_grad()
            wrapped(rows).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for average, parameter in zip(averages, model.net.parameters(), strict=True):
                    average.lerp_(parameter, 0.1)
    return model.average.weight.detach()


def test_average_that_a_loop_holds_follows_after_loss() -> None:
    (alone,) = run_job(with_held_average).results.values()
    for found in run_job(with_held_average, [Kill(4, 2, "backward", joins=(3,))], first=(1, 2)).results.values():
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)


class Growing(torch.optim.Optimizer):
    """Keeps in its options how far it is, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0, "decay": 1.0, "size": torch.ones((), dtype=torch.float64)})
        self.param_groups[0]["sizes"] = torch.ones(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            group["size"] *= 1.1
            group["sizes"] = group["sizes"] * 2
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] * group["size"] / group["steps"]))


def halve(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["decay"] *= 0.5


def with_options() -> tuple[torch.Tensor, dict[str, Any]]:
    """Train with rates that the loop sets before each update, and options that the updates and a hook change."""
    model = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    optimizer = Growing(model.parameters())
    optimizer.register_step_post_hook(lambda *_: halve(optimizer))
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    x = torch.linspace(-1, 1, 2 * SAMPLES, dtype=torch.float64).view(SAMPLES, 2)
    for _ in er.remaining_epochs_until(1):
        steps = er.Accumulator()
        for (rows,) in er.AdaptiveDataLoader(TensorDataset(x), batch_size=BATCH, shuffle=False):
            optimizer.param_groups[0]["lr"] *= 0.8
            optimizer.zero_grad()
            wrapped(rows).square().mean().backward()
            optimizer.step()
            steps["number"] += 1  # the ranks agree at the step's end
    return model.weight.detach(), optimizer.param_groups[0]


@pytest.mark.parametrize("moment", ["backward", "after_step"])
@pytest.mark.parametrize("joins", [(), (3,)])
def test_options_that_an_update_has_changed_stay_with_it(moment: str, joins: tuple[int, ...]) -> None:
    ((alone, _),) = run_job(with_options).results.values()
    for weights, options in run_job(with_options, [Kill(3, 2, moment, joins=joins)], first=(1, 2)).results.values():
        assert options["steps"] == SAMPLES / BATCH and options["decay"] == 0.5 ** options["steps"]
        assert options["sizes"].tolist() == [2.0 ** options["steps"]] * 2
        torch.testing.assert_close(weights, alone, rtol=1e-12, atol=0)


def befores(strategy: str) -> dict[int, list[torch.Tensor]]:
    """Train with a loader of each epoch's own; return the weights before each step, as often as it was drawn."""
    model = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    context, found = er.get_context(), dict[int, list[torch.Tensor]]()
    x = torch.linspace(-1, 1, 2 * SAMPLES, dtype=torch.float64).view(SAMPLES, 2)
    for _ in er.remaining_epochs_until(1):
        for (rows,) in er.AdaptiveDataLoader(TensorDataset(x), batch_size=BATCH):
            found.setdefault(context.get_global_step(), []).append(model.weight.detach().clone())
            optimizer.zero_grad()
            wrapped(rows).square().mean().backward()
            optimizer.step()
    return found


@pytest.mark.parametrize("strategy", ["local_sgd", "sma", "pair"])
@pytest.mark.parametrize("moment", ["forward", "after_step"])
def test_no_update_of_a_lost_step_stays(strategy: str, moment: str) -> None:
    outcome = run_job(lambda: befores(strategy), [Kill(3, 2, moment, last=True)], first=WORKERS)
    first, again = zip(*(outcome.results[worker][3] for worker in (1, 3)), strict=True)
    for each in again:
        torch.testing.assert_close(each, torch.stack(first).mean(0))


def summed(
    strategy: Any, within: Callable[[], None] = lambda: None, after_evaluation: Callable[[], None] = lambda: None
) -> float:
    """Train with gradients of 1 and evaluate within some steps; return how many updates the weight shows."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    ones = TensorDataset(torch.ones(SAMPLES, 1, dtype=torch.float64))
    loader = er.AdaptiveDataLoader(ones, batch_size=BATCH)
    evaluation = er.AdaptiveDataLoader(ones, batch_size=SAMPLES // 2, shuffle=False)
    for _ in er.remaining_epochs_until(1):
        for (rows,) in loader:
            optimizer.zero_grad()
            wrapped(rows).mean().backward()
            optimizer.step()
            within()
            if er.get_context().get_global_step() % 4 == 3:
                with torch.no_grad():
                    for (seen,) in evaluation:
                        wrapped(seen)
                after_evaluation()
    return -model.weight.item()


@pytest.mark.parametrize("strategy", ["sma", LocalSGD(period=1)])
@pytest.mark.parametrize("worker", [1, 2])
def test_a_loss_in_an_evaluation_leaves_the_step(strategy: Any, worker: int) -> None:
    outcome = run_job(lambda: summed(strategy), [Kill(3, worker, "edge", last=True)], first=WORKERS)
    assert list(outcome.results.values()) == [SAMPLES / BATCH] * 2


class Misses:
    """Makes worker 3 miss the end of the first evaluation, which the others have heard of.

    Attributes:
        who: The worker, once it has.
        left: Called on it after that, within the step that it has left.
    """

    def __init__(self, left: Callable[[], None] = lambda: None) -> None:
        self.who, self._left = list[str](), left

    def _missed(self, *args: Any, **options: Any) -> None:
        passes = current_session().passes
        del passes._vote
        passes._vote(*args, **options)
        self.who.append(current_session().worker)
        raise CommunicationFailedError("the end of the vote was lost")  # a step further than scripted faults reach

    def __call__(self) -> None:
        session = current_session()
        if session.worker == "w3" and session.progress.steps == 3 and not self.who:
            vote = session.passes._vote
            session.passes._vote = lambda what, *args, **options: (
                self._missed(what, *args, **options)
                if what.intent is Intent.END_OF_PASS
                else vote(what, *args, **options)
            )

    def after_evaluation(self) -> None:
        if current_session().ledger.has_left:
            self._left()


@pytest.mark.parametrize(("strategy", "loses"), [("sma", None), (LocalSGD(period=1), 1), ("all_reduce", None)])
def test_who_misses_an_evaluations_end_draws_the_step_too(strategy: Any, loses: int | None) -> None:
    """The others are at the end of the step around it; with ``loses``, that worker dies meanwhile."""
    misses = Misses()
    script = [] if loses is None else [Kill(3, loses, "end_of_pass", after=(2,))]
    outcome = run_job(lambda: summed(strategy, misses), script, first=WORKERS)
    assert misses.who == ["w3"] and outcome.told == []
    assert list(outcome.results.values()) == [SAMPLES / BATCH] * (3 if loses is None else 2)
    assert outcome.passes[0][2]["proof"]["samples"] == SAMPLES


def test_left_steps_end_no_later_pass() -> None:
    """Code in them may want to end the pass by what it alone has evaluated; the others have committed the step."""
    wanted: list[bool] = []

    def ends() -> None:
        wanted.append(True)
        current_session().passes.end_after_step()

    misses = Misses(ends)
    outcome = run_job(lambda: summed("all_reduce", misses, misses.after_evaluation), first=WORKERS)
    assert misses.who == ["w3"] and wanted
    assert list(outcome.results.values()) == [SAMPLES / BATCH] * 3
