"""Gradients that go to the owners of their tiles alone (ZeRO-2): training, and what user code sees of ``.grad``."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import elastic_ray as er
from elastic_ray.monitoring import Monitor
from elastic_ray.sync import Strategy, StrategyError
from elastic_ray.sync.sliced_gradients.routes import OwnedSpan, pieces_of, routes
from elastic_ray.sync.sliced_gradients.sliced_gradient import Content, SlicedGradient
from elastic_ray.sync.spec import Owner, Reduce, Rule, Wire
from tests.loop.changing import Change, Hold, Kill, run_job
from tests.sync.tiles.loops import FOUR, SCRIPT, Loop
from tests.sync.tiles.scripts import GROWS_AND_SHRINKS
from tests.sync.tiles.trained import OPTIMIZERS, Case, Net, Run, check, data, run


def same(found: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    """Parameters up to the rounding of sums in another order, and bit by bit on all workers."""
    first = next(iter(found.results.values()))
    for worker, own in found.results.items():
        for mine, others, theirs in zip(own, first, wanted.results[worker], strict=True):
            assert torch.equal(mine, others), worker
            torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


def parameters(outcome: Any) -> Any:
    """Of a job of ``Run``s."""
    results = {worker: each.parameters for worker, each in outcome.results.items()}
    return dataclasses.replace(outcome, results=results)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_two_to_three_to_four_to_two_and_kill(optimizer: str) -> None:
    case = Case(optimizer, strategy="zero2")
    found, wanted = (
        run(each, GROWS_AND_SHRINKS, (1, 2)) for each in (case, dataclasses.replace(case, strategy="zero1"))
    )
    same(parameters(found), parameters(wanted))


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("copies", [1, 3])
def test_other_numbers_of_owners(copies: int) -> None:
    strategy = Owner(unit="tile", gradients="sliced", copies=copies, cut="uneven")
    script = [Change(3, (1, 2, 3, 4)), Change(9, (1, 2, 4, 5)), Change(15, (4, 5))]
    case = Case(strategy=strategy)
    found, wanted = (run(each, script, (1, 2)) for each in (case, dataclasses.replace(case, strategy="all_reduce")))
    same(parameters(found), parameters(wanted))


def test_gradients_may_travel_in_16_bits() -> None:
    strategy = Owner(unit="tile", gradients="sliced", wire=Wire(dtype="bf16"))
    found, wanted = (run(Case("sgd", strategy=each), [], (1, 2, 3)) for each in (strategy, "all_reduce"))
    same(parameters(found), parameters(wanted), tolerance=2e-3)


@given(st.integers(2, 5), st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1, max_size=12), st.randoms())
@settings(max_examples=100, deadline=None)
def test_what_one_rank_sends_is_what_another_expects(world: int, copies: int, sizes: list[int], random: Any) -> None:
    spans = [[OwnedSpan(0, size, tuple(random.sample(range(world), min(copies, world))))] for size in sizes]
    pieces = pieces_of(sizes, spans)
    every = [routes(pieces, rank, world) for rank in range(world)]
    assert all(sum(each.sent_splits) == sum(sizes) for each in every)
    for source, mine in enumerate(every):
        at = passed = 0
        for peer, theirs in enumerate(every):
            to_peer = mine.sent[at : at + len(theirs.kept)]
            assert to_peer == theirs.kept and mine.sent_splits[peer] == sum(piece.length for piece in theirs.kept)
            at += len(theirs.kept)
            from_source = [piece for piece in theirs.followed if piece.owners[0] == source]
            given_on = [mine.kept[i] for i in mine.passed[passed : passed + len(from_source)]]
            assert given_on == from_source and mine.passed_splits[peer] == theirs.followed_splits[source]
            passed += len(from_source)
    owned = [{*each.kept, *each.followed} for each in every]
    for piece in pieces:
        assert {rank for rank, mine in enumerate(owned) if piece in mine} == set(piece.owners)


def test_slices_need_tiles() -> None:
    with pytest.raises(StrategyError, match="gradients='sliced' needs unit='tile'"):
        Owner(gradients="sliced")
    with pytest.raises(StrategyError, match="gradients must be one of full, sliced"):
        Owner(unit="tile", gradients="half")


RARER = ("forward", "optimizer_step", "after_step")


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "moment",
    ["backward", "allreduce", "vote", "publish", *(pytest.param(each, marks=pytest.mark.slow) for each in RARER)],
)
def test_worker_dies_at_any_moment_and_then_the_next(moment: str) -> None:
    script = [Kill(4, 2, moment), Kill(6, 1, moment), Change(9, (3, 4, 5))]
    check(Case("sgd", strategy="zero2"), script, FOUR, exact=False)


@pytest.mark.parametrize("held", [(2, 3), pytest.param((1, 3), marks=pytest.mark.slow)])
def test_workers_that_have_voted_make_a_survivors_update(held: tuple[int, ...]) -> None:
    heard = tuple({1, 2, 3} - set(held))
    script = [Kill(3, 4, "publish", after=heard), *(Hold(3, worker, "vote") for worker in held)]
    found = check(Case(strategy="zero2"), script, FOUR, exact=False)
    first = found.results[1]
    for own in found.results.values():
        for step in own.steps.keys() & first.steps.keys():
            assert all(map(torch.equal, own.steps[step], first.steps[step])), step


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"micro": 2}, {"scaler": True}, {"unfreeze": True}, {"spoiled": 5}])
def test_loops_of_other_kinds_are_as_replicated(options: dict[str, Any]) -> None:
    found = run_job(Loop("zero2", **options), SCRIPT, first=(1, 2, 3))
    wanted = run_job(Loop(None, **options), SCRIPT, first=(1, 2, 3))
    for each in (found, wanted):
        each.results = {worker: result[0] for worker, result in each.results.items()}
    same(found, wanted, 2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
def test_noise_scale_and_norms_are_those_of_replicated_training(optimizer: str) -> None:
    monitor = Monitor(norms_every=1, variance_every=2)
    found = run_job(Loop("zero2", optimizer=optimizer, monitor=monitor), [], first=FOUR)
    wanted = run_job(Loop(None, optimizer=optimizer, monitor=monitor), [], first=FOUR)
    for worker, (_, noise, measures) in found.results.items():
        other = wanted.results[worker]
        assert noise == found.results[1][1] and measures == found.results[1][2], "equal on all ranks"
        assert measures.norms.gradient == pytest.approx(other[2].norms.gradient, rel=1e-4)
        assert measures.norms.update == pytest.approx(other[2].norms.update, rel=1e-4)
        assert measures.variance.groups == pytest.approx(other[2].variance.groups, rel=1e-3)
        assert noise.sqr == pytest.approx(other[1].sqr, rel=0.02) and noise.var == pytest.approx(other[1].var, rel=0.02)


@pytest.mark.thorough
def test_adaptive_batch_scales_learning_rate_alike_on_all_ranks() -> None:
    found = run_job(Loop("zero2", micro=6, rule="adamscale"), SCRIPT, first=(1, 2, 3))
    (first, *_), *others = found.results.values()
    assert all(all(map(torch.equal, first, parameters)) for parameters, *_ in others)


@pytest.mark.thorough
def test_strategies_are_switched_while_training() -> None:
    def switch(trainee: Run, step: int) -> None:
        if asked := {4: "zero2", 8: "zero1", 12: "zero2", 16: "all_reduce", 20: "zero2"}.get(step):
            trainee.wrapped.set_strategy(asked)

    script = [Kill(6, 2, "backward", last=True), Change(13, (1, 3, 4, 5))]
    found = run(Case(strategy="all_reduce", between=switch), script, FOUR)
    wanted = run(Case(strategy="all_reduce"), script, FOUR)
    assert {each.wrapped.strategy.name for each in found.results.values()} == {"zero2"}
    same(parameters(found), parameters(wanted))


@pytest.mark.thorough
def test_rules_by_name_slice_some_gradients_only() -> None:
    rules = (Rule(pattern="norm.*", sync=Owner(unit="tile")), Rule(pattern="last.*", sync=Reduce()))
    strategy = Strategy(rules=rules, default=Owner(unit="tile", gradients="sliced"))
    kinds: list[set[str]] = []

    def look(trainee: Run, step: int) -> None:
        if step:
            kinds.append({name for name, p in trainee.model.named_parameters() if isinstance(p.grad, SlicedGradient)})

    script = [Kill(5, 2, "after_step", last=True), Change(9, (1, 3, 4, 5))]
    found = run(Case(strategy=strategy, between=look), script, FOUR)
    assert {"first.weight", "first.bias"} in kinds and all(each <= {"first.weight", "first.bias"} for each in kinds)
    same(parameters(found), parameters(run(Case(strategy="all_reduce"), script, FOUR)))


# -- user code ---------------------------------------------------------------------------------------------------------

Between = Callable[[nn.Module, torch.optim.Optimizer], Any]


@dataclasses.dataclass(frozen=True)
class _Once:
    """Trains some steps; user code of its own between backward and update."""

    strategy: str
    between: Between
    zero: Callable[[torch.optim.Optimizer], None] = lambda optimizer: optimizer.zero_grad()
    passes: int = 1

    def __call__(self) -> Any:
        model = Net()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=self.strategy)
        found = []
        for _ in er.remaining_epochs_until(1):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=24, seed=3):
                for _ in range(self.passes):
                    out = wrapped(x)
                    if self.passes == 1:
                        self.zero(optimizer)
                    nn.functional.cross_entropy(out, y).backward()
                found.append(self.between(model, optimizer))
                optimizer.step()
        return [*found, [p.detach().clone() for p in model.parameters()]]


def both(between: Between, **options: Any) -> tuple[Any, Any]:
    """What the first of three workers has found under ``zero2`` and replicated; all end with the same parameters."""
    found, wanted = (run_job(_Once(each, between, **options), [], first=(1, 2, 3)) for each in ("zero2", "all_reduce"))
    for worker, own in found.results.items():
        for mine, others, theirs in zip(own[-1], found.results[1][-1], wanted.results[worker][-1], strict=True):
            assert torch.equal(mine, others)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        assert own[:-1] == found.results[1][:-1], "the same numbers on all ranks"
    return found.results[1][:-1], wanted.results[1][:-1]


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    "between",
    [
        lambda model, optimizer: float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
        lambda model, optimizer: float(nn.utils.clip_grad_norm_([model.first.weight], 0.1)),
        lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        lambda model, optimizer: [float(p.grad.data.norm(2)) for p in model.parameters()],
        lambda model, optimizer: float(nn.utils.get_total_norm([p.grad for p in model.parameters()])),
        lambda model, optimizer: [p.grad.mul_(0.5) and None for p in [model.last.bias] if p.grad.div_(2.0) is None],
        lambda model, optimizer: len(torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)),
    ],
    ids=["norm", "norm of one", "value", "norms", "total", "div", "foreach"],
)
def test_what_is_computed_of_gradients_is_right_everywhere(between: Between) -> None:
    found, wanted = both(between)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5) if mine is not None else theirs is None


def test_gradients_may_be_zeroed_between_forward_and_backward() -> None:
    both(lambda model, optimizer: None, zero=lambda optimizer: optimizer.zero_grad(set_to_none=False))


READS: dict[str, Between] = {
    "max": lambda model, optimizer: float(model.last.weight.grad.abs().max()),
    "elements": lambda model, optimizer: model.last.weight.grad[0, 0].item(),
    "numpy": lambda model, optimizer: model.last.weight.grad.numpy(),
    "copy": lambda model, optimizer: model.last.weight.grad.clone(),
    "flatten": lambda model, optimizer: torch.cat([p.grad.reshape(-1) for p in model.parameters()]),
    "to": lambda model, optimizer: model.last.weight.grad.double(),
    "sum": lambda model, optimizer: float(model.last.weight.grad.sum()),
    "noise": lambda model, optimizer: model.last.weight.grad.add_(torch.ones(5, 57)),
    "mask": lambda model, optimizer: model.last.weight.grad.mul_(torch.ones(5, 57)),
    "infinity norm": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf")),
    "rows": lambda model, optimizer: model.last.weight.grad.norm(dim=0),
    "norm of clamped": lambda model, optimizer: [model.last.bias.grad.clamp_(-1, 1), model.last.bias.grad.norm()],
    "pickle": lambda model, optimizer: pickle.dumps(model.last.bias.grad),
    "assign": lambda model, optimizer: model.last.bias.grad.copy_(torch.ones(5)),
}


def test_no_rank_gives_a_number_that_is_wrong() -> None:
    """An error on every rank; user code that continues from it trains as before."""

    def between(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        texts = {}
        for name, read in READS.items():
            with pytest.raises((RuntimeError, TypeError)) as refused:
                read(model, optimizer)
            texts[name] = str(refused.value)
        return texts

    found = run_job(_Once("zero2", between), [], first=(1, 2, 3))
    for own in found.results.values():
        for texts in own[:-1]:
            for name, text in texts.items():
                of_torch = "tensor subclass" in text
                assert of_torch or "adds to gradients" in text or "of a parameter of shape" in text, (name, text)
    assert all(map(torch.equal, found.results[1][-1], found.results[3][-1]))


def test_a_second_backward_pass_without_zeroing_is_refused() -> None:
    for passes in (2, 3):
        with pytest.raises(RuntimeError, match=r"call optimizer.zero_grad\(\) between the two, .* no_sync\(\)"):
            run_job(_Once("zero2", lambda model, optimizer: None, passes=passes), [], first=(1, 2, 3))


def test_passes_without_reduction_are_added_up() -> None:
    def trainee(strategy: str) -> Any:
        model = Net()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
        for _ in er.remaining_epochs_until(2):
            for number, (x, y) in enumerate(er.AdaptiveDataLoader(data(), batch_size=12, seed=3)):
                if number % 2 == 0:
                    optimizer.zero_grad(set_to_none=False)
                    with wrapped.no_sync():
                        nn.functional.cross_entropy(wrapped(x), y).backward()
                    assert float(model.last.bias.grad.abs().max()) > 0, "local gradients are ordinary tensors"
                else:
                    nn.functional.cross_entropy(wrapped(x), y).backward()
                    optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    found, wanted = (run_job(lambda each=each: trainee(each), [], first=(1, 2, 3)) for each in ("zero2", "all_reduce"))
    same(found, wanted)


def test_a_copy_is_a_gradient_of_its_own() -> None:
    def between(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        other = copy.deepcopy(model.last.bias.grad)
        other.mul_(1e-3)
        assert float(other.norm()) == pytest.approx(1e-3 * float(model.last.bias.grad.norm()), rel=1e-5)
        return float(model.last.bias.grad.norm())

    found, wanted = both(between)
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("low", "high", "finite"), [(-1.0, 1.0, True), (None, 1.0, False), (-1.0, None, False)])
def test_a_gradient_clamped_on_one_side_may_be_infinite(low: float | None, high: float | None, finite: bool) -> None:
    content = Content(waits=False, nonfinite=(0, 2), parts={0: torch.tensor([float("inf"), -float("inf")])})
    grad = SlicedGradient(torch.zeros(4), content)
    grad.clamp_(low, high)
    assert grad.finite is finite
    assert bool(content.parts[0].isfinite().all()) is finite


@pytest.mark.parametrize("number", [0.0, -0.0])
def test_a_gradient_divided_by_zero_is_that_of_torch(number: float) -> None:
    wanted = torch.tensor([1.0, -2.0, 0.0])
    content = Content(waits=False, norm=5.0**0.5, parts={0: wanted.clone()})
    grad = SlicedGradient(torch.zeros(3), content)
    grad.div_(number)
    assert torch.equal(content.parts[0].nan_to_num(7.0, 8.0, 9.0), wanted.div_(number).nan_to_num(7.0, 8.0, 9.0))
    assert not grad.finite
    with pytest.raises(RuntimeError, match="can compute 'div_'"):
        grad.div_(torch.ones(3))


def test_adding_to_a_gradient_is_no_second_backward() -> None:
    grad = SlicedGradient(torch.zeros(3), Content(waits=False, norm=1.0))
    with pytest.raises(RuntimeError, match=r"lies in slices .* can compute 'add_'"):
        grad.add_(torch.ones(3))


def test_clipping_and_scaler_do_not_wait_for_each_gradient() -> None:
    params = [nn.Parameter(torch.ones(4)) for _ in range(5)]
    for param in params:
        content = Content(parts={0: torch.full((4,), 2.0)})
        content.know(16.0, 0, 0)
        param.grad = SlicedGradient(param, content)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaler.unscale_(torch.optim.SGD(params, 0.1))
        nn.utils.clip_grad_norm_(params, 1.0)
    reads = sum(each.count for each in profile.key_averages() if each.key == "aten::_local_scalar_dense")
    assert reads <= 2  # of the scaler's inverse, and of the norm's
    wanted = torch.full((4,), 0.5 / 5**0.5 / (1.0 + 1e-6 / 5**0.5))
    for param in params:
        assert isinstance(param.grad, SlicedGradient)
        torch.testing.assert_close(param.grad.part(0, 4), wanted)
