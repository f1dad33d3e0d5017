"""What user code does around an optimizer whose state is in tiles: as with the whole state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.monitoring import Monitor
from elastic_ray.run.current import session_of_thread
from elastic_ray.sync import Strategy
from elastic_ray.sync.optimizer_tiles.tiled_optimizer import TiledOptimizer
from elastic_ray.sync.spec import Owner, Reduce, Rows, Rule
from tests.loop.changing import Change, Kill, run_job
from tests.loop.ranks import RankFailedError, Ranks
from tests.sync.tiles.loops import FOUR, SCRIPT, Loop, Tabled
from tests.sync.tiles.trained import OPTIMIZERS, Case, Net, Run, assert_same_state, check, data, run


@pytest.mark.thorough
def test_every_rank_may_ask_for_state_at_any_step() -> None:
    kept: dict[str, dict[int, Any]] = {"zero1": {}, "all_reduce": {}}

    def ask(trainee: Run, step: int) -> None:
        if step in (2, 9):
            state = copy.deepcopy(trainee.optimizer.state_dict())
            if er.get_context().get_world_rank() == 0:
                kept[trainee.wrapped.strategy.name][step] = state
            elif trainee.wrapped.strategy.name == "zero1":
                assert state["param_groups"] and not state["state"]

    check(Case(between=ask), [Kill(5, 1, "backward", last=True)], FOUR)
    for step in (2, 9):
        assert_same_state(kept["zero1"][step], kept["all_reduce"][step])


def test_rank_0_alone_gets_the_state_after_a_loop() -> None:
    def trainee() -> Any:
        model = Net()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy="zero1")
        found = []
        for _ in er.remaining_epochs_until(3):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=24, seed=3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
            if er.get_context().get_world_rank() == 0:
                found.append(optimizer.state_dict())
                assert len(found[-1]["state"]) == 6
                other = OPTIMIZERS["adamw"](Net().parameters())
                other.load_state_dict(found[-1])
        return found

    found = run_job(trainee, [Change(3, (1, 2, 3, 4)), Change(7, (2, 3, 4))], first=(1, 2, 3))
    assert [len(found.results[worker]) for worker in (2, 3, 4)] == [2, 0, 0]


def _ask_alone() -> None:
    def ask(trainee: Run, step: int) -> None:
        if step == 3 and er.get_context().get_world_rank() == 0:
            trainee.optimizer.state_dict()

    Run(Case(between=ask))


@pytest.mark.thorough
def test_rank_0_alone_in_a_loop_is_told_others(ranks: Ranks) -> None:
    said = r"RanksDisagreeError: .*rank 0 calls optimizer.state_dict\(\) of model 0, .* on all of them"
    with pytest.raises(RankFailedError, match=said):
        ranks.run(_ask_alone, world=3)


def _drop_a_gradient(strategy: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
    for _ in er.remaining_epochs_until(1):
        for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            if er.get_context().get_world_rank() == 1:
                model.last.weight.grad = None
            optimizer.step()


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_rank_that_has_dropped_a_gradient_is_told(ranks: Ranks, strategy: str) -> None:
    said = (
        r"RanksDisagreeError: .*rank.* 1 steps the optimizer of model 0 "
        r"\(which parameters have a gradient, and learning rates: [0-9a-f]{8}\)"
    )
    with pytest.raises(RankFailedError, match=said):
        ranks.run(_drop_a_gradient, strategy, world=3)


def test_a_state_may_be_loaded_meanwhile() -> None:
    states: dict[str, Any] = {}

    def between(trainee: Run, step: int) -> None:
        name = trainee.wrapped.strategy.name
        if step == 4:
            state = trainee.optimizer.state_dict()
            if er.get_context().get_world_rank() == 0:
                states[name] = copy.deepcopy(state)
        if step == 9:
            trainee.optimizer.load_state_dict(copy.deepcopy(states[name]))

    check(Case(between=between), [Change(11, (2, 3, 4))], FOUR)


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "script",
    [[], [Change(6, (1, 2, 3)), Change(14, (2, 3, 4))], [Kill(6, 2, "backward", last=True), Change(11, (1, 3, 4, 5))]],
    ids=["no change", "planned", "killed"],
)
def test_strategies_are_switched_while_training(optimizer: str, script: Any) -> None:
    def switch(trainee: Run, step: int) -> None:
        if asked := {4: "zero1", 8: "all_reduce", 12: "partitioned_ps", 16: "zero1"}.get(step):
            trainee.wrapped.set_strategy(asked)

    found = run(Case(optimizer, strategy="all_reduce", between=switch), script, FOUR)
    wanted = run(Case(optimizer, strategy="all_reduce"), script, FOUR)
    assert {each.wrapped.strategy.name for each in found.results.values()} == {"zero1"}
    for worker, own in found.results.items():
        assert all(map(torch.equal, own.parameters, wanted.results[worker].parameters)), worker
        if own.rank == 0:
            assert_same_state(own.saved, wanted.results[worker].saved)


@pytest.mark.thorough
def test_rules_by_name_leave_other_parameters_whole() -> None:
    strategy = Strategy(rules=(Rule(pattern="last.*", sync=Reduce()),), default=Owner(unit="tile"))
    found = check(Case(strategy=strategy), [Kill(5, 2, "after_step", last=True), Change(9, (1, 3, 4, 5))], FOUR)
    assert "the same on 2 of them" in str(found.results[1].wrapped.explain_strategy())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"micro": 2},
        {"scaler": True},
        {"unfreeze": True},
        {"spoiled": 5},
        {"model": Tabled, "optimizer": "foreach sgd"},
    ],
    ids=lambda options: " ".join(options),
)
def test_loops_of_other_kinds_are_bitwise_as_replicated(options: dict[str, Any]) -> None:
    strategy: Any = "zero1"
    if "model" in options:
        strategy = Strategy(rules=(Rule(pattern="table.*", sync=Rows()),), default=Owner(unit="tile"))
    replicated = "parallax" if "model" in options else None
    found = run_job(Loop(strategy, **options), SCRIPT, first=(1, 2, 3))
    wanted = run_job(Loop(replicated, **options), SCRIPT, first=(1, 2, 3))
    for worker, (parameters, *_) in found.results.items():
        assert all(map(torch.equal, parameters, wanted.results[worker][0])), worker


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adagrad", "rmsprop"])
def test_noise_scale_and_norms_are_those_of_replicated_training(optimizer: str) -> None:
    monitor = Monitor(norms_every=1)
    found = run_job(Loop("zero1", optimizer=optimizer, monitor=monitor), [], first=FOUR)
    wanted = run_job(Loop(None, optimizer=optimizer, monitor=monitor), [], first=FOUR)
    for worker, (parameters, noise, measures) in found.results.items():
        assert all(map(torch.equal, parameters, wanted.results[worker][0])), worker
        assert measures.norms.update == pytest.approx(wanted.results[worker][2].norms.update, rel=1e-4)
        assert noise == found.results[1][1], "equal on all ranks"
        other = wanted.results[worker][1]
        assert noise.sqr == pytest.approx(other.sqr, rel=0.02) and noise.var == pytest.approx(other.var, rel=0.02)


def test_learning_rate_by_noise_is_same_on_all_ranks() -> None:
    found = run_job(Loop("zero1", micro=6, rule="adamscale"), SCRIPT, first=(1, 2, 3))
    (first, *_), *others = found.results.values()
    assert all(all(map(torch.equal, first, parameters)) for parameters, *_ in others)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize(("saving", "going_on"), [("zero1", "zero1"), ("zero1", None), (None, "zero1")])
def test_a_checkpoint_has_no_group_size_or_strategy(saving: Any, going_on: Any) -> None:
    def trainee(strategy: Any, epochs: int, states: Any) -> Any:
        model = Net()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
        session = session_of_thread()
        assert session is not None
        if states is not None:
            session.states.resume(copy.deepcopy(states), loaded=True)
        for _ in er.remaining_epochs_until(epochs):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3, drop_last=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
        session.registry.prepare_to_save()
        saved = copy.deepcopy(session.states.capture_to_save()) if session.rank == 0 else None
        return saved, [p.detach().clone() for p in model.parameters()]

    def trained(strategy: Any, epochs: int, states: Any, workers: int) -> Any:
        first = tuple(range(1, workers + 1))
        return run_job(lambda: trainee(strategy, epochs, states), [], first=first).results[1]

    saved, _ = trained(saving, 1, None, 4)
    assert len(saved["optimizer/0"]["state"]) == 6
    _, found = trained(going_on, 2, saved, 3)
    reference, _ = trained(None, 1, None, 4)
    _, wanted = trained(None, 2, reference, 3)
    assert all(map(torch.equal, found, wanted))


def test_what_process_keeps_for_a_rerun_are_its_tiles() -> None:
    def trainee() -> Any:
        model = Net()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy="zero1")
        session = session_of_thread()
        assert session is not None
        for _ in er.remaining_epochs_until(1):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3, drop_last=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
        found = session.keep_state()
        assert found is not None
        tree = copy.deepcopy(found[0]["optimizer/0"])
        again = TiledOptimizer(session, model, OPTIMIZERS["adamw"](model.parameters()), 0)
        again.restore(tree["divided"], whole=False)
        assert again.kept()["tiles"].keys() == tree["divided"]["kept"]["tiles"].keys()
        return {int(tile) for tile in tree["divided"]["kept"]["tiles"]}, wrapped._steps[0].tiles._holder.owners

    found = run_job(trainee, [], first=(1, 2, 3))
    for rank, (tiles, owners) in enumerate(found.results[worker] for worker in (1, 2, 3)):
        assert tiles == {tile for tile, mine in enumerate(owners) if rank in mine}


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_gradients_from_no_backward_pass_are_refused(strategy: str) -> None:
    """Zeroed ones are not, nor those that the last step has left."""

    def trained() -> None:
        model = Net()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=strategy)
        for _ in er.remaining_epochs_until(1):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3):
                step = er.get_context().get_global_step()
                if step != 1:
                    optimizer.zero_grad(set_to_none=step != 2)
                if step in (1, 2):
                    optimizer.step()
                    continue
                loss = nn.functional.cross_entropy(wrapped(x), y)
                if step < 4:
                    loss.backward()
                else:
                    for p, grad in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
                        p.grad = grad
                optimizer.step()
                assert step < 4, "it was to be refused"

    with pytest.raises(RuntimeError, match=r"no backward\(\) pass has averaged.*Call backward\(\) on a loss"):
        run_job(trained, [], first=(1, 2, 3))
