"""What holds of averaged models beside their formulas: what they equal, what is saved, switched, and refused."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.checkpoints.automatic import state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.reading import open_checkpoint
from elastic_ray.loop.api import current_session
from elastic_ray.membership.messages import StopJob
from elastic_ray.run.current import WorkerDismissed
from elastic_ray.run.registry import HookPoint
from elastic_ray.sync import AdaptiveSGD, LocalSGD, Strategy, StrategyError
from elastic_ray.sync.spec import Average
from elastic_ray.worker.state_saver import StateSaver
from tests.loop.alone import session_of
from tests.loop.changing import run_job
from tests.loop.ranks import RankFailedError, Ranks
from tests.sync.averages import AVERAGES
from tests.sync.drifting import BATCH, EPOCHS, STEPS, Loop, adam, net, plain, reference, rows, sgd, weights
from tests.sync.tiles.saving import wait_until


def train(strategy: Any, make: Any) -> Any:
    return Loop(strategy, make)()


# -- what they equal -----------------------------------------------------------------------------------------------


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("world", [2, 3])
def test_local_sgd_of_every_step_equals_plain_all_reduce(ranks: Ranks, world: int) -> None:
    ours = ranks.run(train, LocalSGD(period=1), plain, world=world)
    theirs = ranks.run(train, "all_reduce", plain, world=world)
    torch.testing.assert_close(ours[0][0], theirs[0][0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco", "sma", "pair"])
def test_they_have_names_and_train_alone_with_them(strategy: str) -> None:
    session_of()
    model, _ = Loop(strategy)()
    if strategy == "diloco":
        return  # its outer step is taken by one as by many
    wanted, _ = reference(Average(), 1)
    assert torch.allclose(model, wanted)


def test_adaptive_sgd_reduces_gradients_after_its_step(ranks: Ranks) -> None:
    ours, theirs = ranks.run(train, AdaptiveSGD(change_step=4, alpha=0.3), sgd, world=2)
    for step, (mine, other) in enumerate(zip(ours[1], theirs[1], strict=True)):
        assert torch.equal(mine.after, other.after) == (step >= 4)
    last = torch.stack([seen[3].after for _, seen in (ours, theirs)])
    torch.testing.assert_close(ours[1][4].before, last.mean(0), rtol=0, atol=1e-9)


# -- what is saved -------------------------------------------------------------------------------------------------


class Saving:
    """Saves automatic checkpoints on rank 0, and notes each rank's model between two steps."""

    def __init__(self, path: Path, strategy: Any) -> None:
        self._path, self._loop = path, Loop(strategy, adam, self._inside)
        self.models: dict[int, list[Tensor]] = {}
        self.savers: list[StateSaver] = []

    def __call__(self) -> Any:
        session = current_session()
        storage = RunStorage(str(self._path))
        saver = StateSaver(session, storage, lambda saved: 1e5, keep=100, interval_s=1e-9)

        def between_steps() -> None:
            saver.between_steps()
            wait_until(lambda: not saver._parts.makes_memory and not saver._busy())

        if session.rank == 0:
            session.registry.add_hook(HookPoint.BETWEEN_STEPS, between_steps)
        self.savers.append(saver)
        return self._loop()

    def _inside(self, step: int, model: nn.Module) -> None:
        registry = current_session().registry
        if not getattr(model, "noted", False):
            model.noted = True
            registry.add_hook(HookPoint.BETWEEN_STEPS, lambda: self._note(model))

    def _note(self, model: nn.Module) -> None:
        session = current_session()
        if session.registry.settled:
            self.models.setdefault(session.progress.steps, []).append(weights(model))


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("name", AVERAGES)
def test_a_checkpoint_holds_the_one_model_and_loads_anywhere(name: str, tmp_path: Path) -> None:
    saving = Saving(tmp_path, Strategy(average=AVERAGES[name]))
    run_job(saving, first=(1, 2, 3))
    for saver in saving.savers:
        saver.close()
    files = state_files(RunStorage(str(tmp_path)))
    assert files
    for state in files:
        trees = open_checkpoint(RunStorage(str(tmp_path)), state)
        model = net()
        model.load_state_dict(trees["model/0"])
        mine = saving.models[state.steps]
        assert len(mine) % 3 == 0 and mine  # ranks come by between two steps twice at the end of a pass
        assert all(torch.equal(weights(model), each) for each in mine)
    trees = open_checkpoint(RunStorage(str(tmp_path)), files[0])
    for strategy in ("all_reduce", Strategy(average=AVERAGES[name]), "diloco", "pair"):
        session_of(copy.deepcopy(trees))
        trained, seen = Loop(strategy, adam)()
        assert len(seen) == STEPS - files[0].steps and trained.isfinite().all()


def test_a_job_that_is_preempted_saves_the_one_model(tmp_path: Path) -> None:
    saving = Saving(tmp_path, Strategy(average=AVERAGES["sma"]))
    held: list[Tensor] = []

    def loop() -> None:
        session = current_session()
        models: list[nn.Module] = []

        def preempt(step: int, model: nn.Module) -> None:
            models[:] = [model]
            if step == 3 and session.rank == 0:
                session.membership.post(StopJob(save=True))

        try:
            Loop(Strategy(average=AVERAGES["sma"]), inside=preempt)()
        except WorkerDismissed:
            held.append(weights(models[0]))
            if session.rank == 0:
                saver = StateSaver(session, RunStorage(str(tmp_path)), lambda saved: 1e5, keep=1, interval_s=None)
                assert saver.save() == ""
            raise

    del saving
    run_job(loop, first=(1, 2))
    (state,) = state_files(RunStorage(str(tmp_path)))
    model = net()
    model.load_state_dict(open_checkpoint(RunStorage(str(tmp_path)), state)["model/0"])
    assert len(held) == 2 and all(torch.equal(weights(model), each) for each in held)


# -- switches ------------------------------------------------------------------------------------------------------


def switching(strategies: list[Any]) -> Any:
    """Another strategy every two steps."""
    model = net()
    optimizer = sgd(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategies[0], scaling_rule="none")
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3)
    seen = []
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, _ in loader:
            before, step = weights(model), er.get_context().get_global_step()
            if step and step % 2 == 0:
                wrapped.set_strategy(strategies[step // 2 % len(strategies)])
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            seen.append((before, weights(model), wrapped.strategy))
    return weights(model), seen


def test_strategies_are_switched_and_models_made_one_before(ranks: Ranks) -> None:
    strategies = [Strategy(average=AVERAGES[name]) for name in ("sma", "diloco", "pair")]
    strategies[1:1] = ["all_reduce"]
    strategies[3:3] = ["powersgd"]
    found = ranks.run(switching, strategies, world=2)
    (ours, mine), (theirs, others) = found
    assert torch.equal(ours, theirs)
    for (_, _, strategy), (before, _, then), (other, _, _) in zip(mine[:-1], mine[1:], others[1:], strict=True):
        if then != strategy:
            assert torch.equal(before, other), f"{strategy.name} -> {then.name}"
    assert len({strategy for _, _, strategy in mine}) >= 4


# -- what differs from rank to rank --------------------------------------------------------------------------------


class Rare(nn.Module):
    """A layer that only some samples pass through, and so only some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare = nn.Linear(5, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.first(x))
        return out + self.rare(out) if er.get_context().get_world_rank() == 1 else out


def rarely(strategy: str) -> Any:
    torch.manual_seed(1)
    model = Rare().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategy)
    begun = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, _ in er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]
    return model.state_dict(), states, begun


@pytest.mark.parametrize("strategy", ["local_sgd", "sma", "pair"])
def test_moments_that_only_some_ranks_have_reach_all(ranks: Ranks, strategy: str) -> None:
    (ours, states, begun), (theirs, others, _) = ranks.run(rarely, strategy, world=2)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(mine.keys() == other.keys() and mine for mine, other in zip(states, others, strict=True))
    assert all(torch.equal(mine[key], other[key]) for mine, other in zip(states, others, strict=True) for key in mine)
    assert not torch.equal(ours["rare.weight"], begun["rare.weight"])


def with_a_scaler(strategy: str) -> Any:
    """Rank 1's gradients of one step are not finite: its scaler leaves that update out, the other does not."""
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    wrapped = er.AdaptiveDataParallel(model, optimizer, grad_scaler=scaler, strategy=strategy)
    context, applied = er.get_context(), []
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, _ in er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3):
            before = weights(model)
            optimizer.zero_grad()
            loss = wrapped(x).square().mean()
            if context.get_world_rank() == 1 and context.get_global_step() == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            applied.append(not torch.equal(weights(model), before))
    return weights(model), applied, scaler.get_scale()


@pytest.mark.parametrize("strategy", ["local_sgd", "sma", "diloco"])
def test_update_that_one_ranks_scaler_leaves_out_disturbs_nobody(ranks: Ranks, strategy: str) -> None:
    (ours, applied, scale), (theirs, others, less) = ranks.run(with_a_scaler, strategy, world=2)
    assert torch.equal(ours, theirs) and ours.isfinite().all()
    assert all(applied) and [step for step, made in enumerate(others) if not made] == [3]
    assert scale == less == 128.0, "all end with the smaller scale"


@pytest.mark.parametrize("how", ["until", "switch"])
def test_ranks_whose_loss_scales_differ_continue_from_the_smallest(how: str) -> None:
    """Gradients that are added up afterwards are scaled alike."""

    def train() -> Any:
        model = net()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        strategy = AdaptiveSGD(change_step=4) if how == "until" else "sma"
        wrapped = er.AdaptiveDataParallel(
            model, optimizer, grad_scaler=scaler, strategy=strategy, nonfinite="ignore", scaling_rule="none"
        )
        context, scales, models = er.get_context(), [], []
        for _ in er.remaining_epochs_until(EPOCHS):
            for x, _ in er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3):
                step = context.get_global_step()
                if how == "switch" and step == 3:
                    wrapped.set_strategy("all_reduce")
                optimizer.zero_grad()
                loss = wrapped(x).square().mean()
                if current_session().rank == 1 and step == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                models.append(weights(model))
        return scales, models

    results = run_job(train, first=(1, 2)).results
    (ours, mine), (theirs, others) = results[1], results[2]
    assert ours == [256.0] * 4 + [128.0] * (STEPS - 4)
    assert theirs == [256.0] + [128.0] * (STEPS - 1)
    assert all(torch.equal(one, other) for one, other in zip(mine[4:], others[4:], strict=True))


def two_models(first: str, second: str) -> Any:
    """A loop with two models, of which the second one trains in every other step."""
    models = [net(), net()]
    optimizers = [sgd(model) for model in models]
    pairs = zip(models, optimizers, (first, second), strict=True)
    wrapped = [er.AdaptiveDataParallel(*each, strategy=name, scaling_rule="none") for *each, name in pairs]
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, _ in er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3):
            for number in range(1 + er.get_context().get_global_step() % 2):
                optimizers[number].zero_grad()
                wrapped[number](x).square().mean().backward()
                optimizers[number].step()
    return [weights(model) for model in models]


@pytest.mark.parametrize(("first", "second"), [("sma", "diloco"), ("all_reduce", "pair"), ("local_sgd", "all_reduce")])
def test_several_models_have_strategies_of_their_own(ranks: Ranks, first: str, second: str) -> None:
    ours, theirs = ranks.run(two_models, first, second, world=2)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def skipping(strategy: str) -> Any:
    """Rank 1's gradients of one step are NaN."""
    model = net()
    optimizer = plain(model)
    wrapped = er.AdaptiveDataParallel(model, optimizer, strategy=strategy, nonfinite="skip")
    for _ in er.remaining_epochs_until(EPOCHS):
        for x, _ in er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3):
            bad = er.get_context().get_world_rank() == 1 and er.get_context().get_global_step() == 3
            optimizer.zero_grad()
            (wrapped(x).square().mean() * (float("nan") if bad else 1.0)).backward()
            optimizer.step()
    return weights(model)


def test_an_update_not_finite_is_left_out_there(ranks: Ranks) -> None:
    ours, theirs = ranks.run(skipping, "sma", world=2)
    assert torch.equal(ours, theirs) and ours.isfinite().all()


# -- what is refused -----------------------------------------------------------------------------------------------


def differing() -> Any:
    rank = current_session().group.rank_info.rank
    return Loop(["sma", "pair"][rank])()


def test_ranks_that_average_otherwise_learn_it_in_first_step(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match="the ranks do different things in step 1"):
        ranks.run(differing, world=2)


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_strategy_asked_for_by_one_rank_is_refused(moment: str) -> None:
    """Before the backward pass of a step, or after its update."""
    told: list[str] = []
    both = threading.Barrier(2)  # the job ends with the first error

    def train() -> None:
        model = net()
        optimizer = sgd(model)
        wrapped = er.AdaptiveDataParallel(model, optimizer, strategy="local_sgd", scaling_rule="none")

        def ask(now: str) -> None:
            if now == moment and current_session().rank == 0 and er.get_context().get_global_step() == 2:
                wrapped.set_strategy("all_reduce")

        try:
            for _ in er.remaining_epochs_until(EPOCHS):
                for x, _ in er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3):
                    ask("before")
                    optimizer.zero_grad()
                    wrapped(x).square().mean().backward()
                    optimizer.step()
                    ask("after")
        except er.errors.RanksDisagreeError as error:
            told.append(str(error))
            both.wait(20)
            raise

    with pytest.raises(er.errors.RanksDisagreeError):
        run_job(train, first=(1, 2))
    assert len(told) == 2 and all("the ranks do different things in step" in each for each in told)


@pytest.mark.parametrize("rule", ["adascale", "adamscale"])
def test_rules_that_need_the_noise_scale_are_refused(rule: str) -> None:
    session_of()
    model = net()
    with pytest.raises(
        StrategyError, match=r"scaling_rule Ada\w*Scale needs the gradient noise scale, but strategy 'sm"
    ):
        er.AdaptiveDataParallel(model, sgd(model), strategy="sma", scaling_rule=rule)
    session_of()
    wrapped = er.AdaptiveDataParallel(model, sgd(model), scaling_rule=rule)
    with pytest.raises(StrategyError, match="averages models"):
        wrapped.set_strategy("sma")


def test_an_adaptive_batch_is_refused() -> None:
    session_of()
    model = net()
    optimizer = sgd(model)
    er.AdaptiveDataParallel(model, optimizer, strategy="local_sgd")
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH)
    loader.autoscale_batch_size(max_batch_size=48)
    with pytest.raises(StrategyError, match=r"an adaptive batch .* needs the gradient noise scale"):
        next(iter(er.remaining_epochs_until(1)))


def test_tables_with_sparse_gradients_are_refused() -> None:
    session_of()
    model = nn.Embedding(10, 4, sparse=True)
    with pytest.raises((StrategyError, ValueError), match="sparse"):
        er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="local_sgd")
