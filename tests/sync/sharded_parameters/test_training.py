"""A sharded model is trained as a whole one, by any number of workers."""

from __future__ import annotations

import contextvars
import copy
import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elastic_ray as er
from elastic_ray.run.current import session_of_thread
from elastic_ray.sync.operations.gradient_checks import Finiteness
from elastic_ray.sync.sharded_parameters import shard_collectives as collectives
from elastic_ray.sync.sharded_parameters import sharded_gradients
from elastic_ray.sync.sharded_parameters.process_group import ShardProcessGroup, mesh_of_one
from elastic_ray.sync.sharded_parameters.row_layout import layout_of
from elastic_ray.sync.sharded_parameters.shard_collectives import ShardCollectives
from tests.loop.changing import Change, Kill, run_job
from tests.sync.sharded_parameters.sharded import (
    CLOSE,
    SAMPLES,
    Case,
    Net,
    Run,
    check,
    data,
    run,
    sharded_net,
    train_an_epoch,
)


@pytest.mark.parametrize("workers", [1, 3, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 4))])
def test_training_is_that_of_a_whole_model(workers: int) -> None:
    found = check(Case(), [], tuple(range(1, workers + 1)))
    elements = sum(p.numel() for p in Net().parameters())
    for own in found.results.values():
        assert max(own.held) <= 2 * elements * 2 / workers * 1.35, "two shards of two moments"


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        Case(micro=2),  # a rank takes several micro-batches, some ranks other ones than others
        Case(optimizer="sgd", batch=10),  # 3 or 4 samples each
        pytest.param(Case(optimizer="adagrad", clip=False), marks=pytest.mark.slow),
        pytest.param(Case(nonfinite="skip"), marks=pytest.mark.slow),
        Case(options=(("reshard_after_forward", True),)),
        pytest.param(Case(options=(("reshard_after_forward", False),)), marks=pytest.mark.slow),
    ],
    ids=["accumulation", "unequal shares", "adagrad", "saved buffers", "reshard", "keep"],
)
def test_other_loops_are_as_with_a_whole_model(case: Case) -> None:
    check(case, [Change(4, (1, 2, 3)), Kill(9, 2, "backward")], (1, 2))


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "whole"])
def test_four_ranks_accumulate_as_one(sharded: bool) -> None:
    """12 samples are 3 for each of 4 ranks, 2 and then 1: no batch is larger than the largest that is allowed."""
    check(Case(optimizer="sgd", micro=2, sharded=sharded), [], (1, 2, 3, 4))


def test_a_model_is_sharded_after_torchs_groups_were_destroyed() -> None:
    sharded_net()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    dist.destroy_process_group()
    assert len(list(sharded_net().parameters())) == len(list(Net().parameters()))


def test_models_on_two_devices_are_sharded_in_one_process() -> None:
    """A GPU's and the CPU's; here no memory's in the place of the GPU's."""
    first, second = mesh_of_one("cpu"), mesh_of_one("meta")
    assert first.get_group().name() == second.get_group().name() and first.device_type != second.device_type
    assert first.mesh_dim_names == second.mesh_dim_names


def test_a_worker_alone_accumulates_as_with_a_whole_model() -> None:
    """By SGD: optimizers of Adam's kind do not tell whether a micro-batch weighs once or twice."""
    check(Case(optimizer="sgd", micro=3, clip=False), [], (1,))


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("order", [math.inf, -math.inf, 1.0, 2.0, 3.0])
def test_norms_of_any_order_are_those_of_the_whole(order: float, foreach: bool | None) -> None:
    """Some parameters have fewer rows than there are workers."""

    def trained(sharded: bool) -> list[float]:
        model = sharded_net() if sharded else Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        found = list[float]()
        for _ in er.remaining_epochs_until(1):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=24, seed=3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                found.append(float(model.last.bias.grad.norm(order)))
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=order, foreach=foreach)
                found.append(float(norm))
                by_row = torch.linalg.vector_norm(model.first.weight.grad, order, dim=1)
                found.append(float(by_row.sum()))
                optimizer.step()
        return found

    wanted = run_job(lambda: trained(False)).results[1]
    found = run_job(lambda: trained(True), first=(1, 2, 3, 4, 5)).results
    assert len(found) == 5 and all(own == pytest.approx(wanted, rel=1e-4, abs=1e-6) for own in found.values()), (
        found,
        wanted,
    )


def _clips_in_a_hook(run: Run, step: int) -> None:
    """From a worker's first step on, by what its optimizer holds."""
    if not run.held:
        session = session_of_thread()
        assert session is not None

        def clip(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            session.moment("hook")
            nn.utils.clip_grad_norm_([p for group in stepped.param_groups for p in group["params"]], 0.1)

        run.optimizer.register_step_pre_hook(clip)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "script",
    [[], [Change(5, (1, 2)), Kill(9, 2, "vote"), Change(14, (1, 3, 4))], [Kill(4, 3, "hook"), Kill(6, 1, "hook")]],
    ids=["none", "changes", "losses in the hook"],
)
def test_hook_before_the_step_sees_gradients_of_whole_parameters(script: list[Change | Kill]) -> None:
    check(Case(clip=False, between=_clips_in_a_hook), script, (1, 2, 3))


@pytest.mark.parametrize("asks", ["at once", "at the end, as on a GPU"])
def test_gradients_not_finite_are_left_out_the_rank_named(asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if asks != "at once":
        for module in (collectives, sharded_gradients):
            monkeypatch.setattr(module, "Finiteness", lambda: Finiteness(lambda tensor: False))

    def trained() -> Any:
        model = sharded_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", nonfinite="skip")
        kept = None
        for _ in er.remaining_epochs_until(1):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3):
                step, rank = er.get_context().get_global_step(), er.get_context().get_world_rank()
                if step in (4, 5):
                    now = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
                    assert step == 4 or all(map(torch.equal, kept, now)), "no rank has made the update"
                    kept = now
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(wrapped(x), y)
                (loss * float("nan") if (step, rank) == (4, 1) else loss).backward()
                optimizer.step()

    told = run_job(trained, [], first=(1, 2, 3)).told
    (text,) = [text for kind, text, _ in told if kind == "not_finite"]
    assert "on rank 1 in step 4; the update was left out" in text


def test_frozen_layers_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(13, 13, bias=False), nn.Linear(13, 13, bias=False)
            self.frozen, self.last = nn.Linear(13, 7), nn.Linear(7, 3)
            self.second.weight = self.first.weight
            self.frozen.requires_grad_(False)
            generator = torch.Generator().manual_seed(7)
            for p in self.parameters():
                p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.frozen(self.second(torch.tanh(self.first(x))))))

    def trained(*, sharded: bool) -> Any:
        model = Tied()
        if sharded:
            er.fully_shard(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-2)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        train_an_epoch(wrapped, optimizer)
        return model.state_dict(), er.get_context().get_world_rank()

    found = run_job(lambda: trained(sharded=True), [Change(3, (1, 2, 3)), Kill(6, 1, "vote")], first=(1, 2))
    (wanted, _) = run_job(lambda: trained(sharded=False), [], first=(1,)).results[1]
    (whole,) = [state for state, rank in found.results.values() if rank == 0]
    assert whole.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=CLOSE)


def _loop(epochs: int, states: Any = None, *, loaded: Any = None) -> Any:
    model = sharded_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)
    if loaded is not None:
        model.load_state_dict(loaded[0])
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    session = session_of_thread()
    assert session is not None
    if states is not None:
        session.states.resume(copy.deepcopy(states), loaded=True)
    if loaded is not None:
        optimizer.load_state_dict(copy.deepcopy(loaded[1]))
    for _ in er.remaining_epochs_until(epochs):
        for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3, drop_last=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    session.registry.prepare_to_save()
    saved = copy.deepcopy(session.states.capture_to_save()) if session.rank == 0 else None
    return saved, model.state_dict(), optimizer.state_dict()


def test_an_automatic_checkpoint_is_of_no_size_of_group() -> None:
    saved, *_ = run_job(lambda: _loop(1), [], first=(1, 2, 3)).results[1]
    _, found, _ = run_job(lambda: _loop(2, saved), [], first=(1, 2)).results[1]
    _, wanted, _ = run_job(lambda: _loop(2), [], first=(1,)).results[1]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=CLOSE)


def test_what_state_dicts_give_they_take() -> None:
    """Whole tensors, before the model joins a run, by any number of workers."""
    _, *first = run_job(lambda: _loop(1), [], first=(1, 2)).results[1]
    assert first[0]["blocks.0.up.weight"].shape == (9, 7)
    found = run_job(lambda: _loop(1, loaded=first), [Kill(4, 2, "edge")], first=(1, 2, 3)).results
    wanted = run_job(lambda: _loop(1, loaded=first), [], first=(1,)).results[1]
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][1][name], value, rtol=0, atol=CLOSE)
    assert found[1][2]["state"][0]["step"] == 2 * SAMPLES // 12


def test_a_model_is_loaded_between_steps_with_followed_rows() -> None:
    """As a loop does that goes back to its best state: the worker that follows must have the rows as well."""
    kept: dict[str, Any] = {}

    def between(run: Run, step: int) -> None:
        if step == 0:
            kept["model"] = {name: p.detach().clone() for name, p in Net().named_parameters()} | {
                "seen": torch.zeros(1)
            }
        if step == 6:
            run.model.load_state_dict(kept["model"])

    found = run(Case(optimizer="sgd", between=between), [Kill(7, 2, "edge")], (1, 2, 3))
    wanted = run(Case(optimizer="sgd", between=between), [], (1,)).results[1]
    whole = next(own for own in found.results.values() if own.rank == 0)
    for name, value in wanted.parameters.items():
        torch.testing.assert_close(whole.parameters[name], value, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loop_may_call_the_model_itself(workers: int) -> None:
    """As libraries do that keep the model: its backward passes are seen all the same."""

    def trained(*, wrapped_is_called: bool) -> Any:
        model = sharded_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        loader = er.AdaptiveDataLoader(data(), batch_size=12, seed=3)
        loader.autoscale_batch_size(12, local_bsz_bounds=(1, 4), gradient_accumulation=True)
        for _ in er.remaining_epochs_until(1):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy((wrapped if wrapped_is_called else model)(x), y).backward()
                optimizer.step()
        return model.state_dict()

    first = tuple(range(1, workers + 1))
    found = run_job(lambda: trained(wrapped_is_called=False), [], first=first).results[1]
    wanted = run_job(lambda: trained(wrapped_is_called=True), [], first=first).results[1]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("wrapped_is_called", [True, False])
def test_a_failed_backward_pass_does_not_hold_up_others(wrapped_is_called: bool) -> None:
    """As loops do that try again with fewer samples when a GPU's memory is full."""

    def full(*arguments: Any) -> None:
        raise MemoryError("full")

    def trained(*, raises: bool) -> Any:
        model = sharded_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        for _ in er.remaining_epochs_until(1):
            for number, (x, y) in enumerate(er.AdaptiveDataLoader(data(), batch_size=12, seed=3)):
                called = wrapped if wrapped_is_called else model
                if raises and number == 2:
                    hook = model.blocks[0].register_full_backward_hook(full)
                    with pytest.raises(MemoryError):
                        nn.functional.cross_entropy(called(x), y).backward()
                    hook.remove()
                optimizer.zero_grad()
                nn.functional.cross_entropy(called(x), y).backward()
                optimizer.step()
        return model.state_dict()

    found = run_job(lambda: trained(raises=True), [], first=(1,)).results[1]
    wanted = run_job(lambda: trained(raises=False), [], first=(1,)).results[1]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("added", [True, False], ids=["added", "frozen"])
def test_layers_unfrozen_later_are_trained_from_then_on(added: bool) -> None:
    """By all ranks, whether they were in the optimizer all along or come as a group of their own; joiners follow."""

    def trained(*, sharded: bool) -> Any:
        model = sharded_net() if sharded else Net()
        model.last.requires_grad_(False)
        held = [p for p in model.parameters() if p.requires_grad or not added]
        optimizer = torch.optim.AdamW(held, lr=0.01, eps=1e-2)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        for _ in er.remaining_epochs_until(1):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3):
                if er.get_context().get_global_step() == 2:
                    model.last.requires_grad_(True)
                    if added:
                        optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.02})
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
        return model.state_dict()

    found = run_job(lambda: trained(sharded=True), [Change(4, (1, 2, 3))], first=(1, 2)).results[1]
    wanted = run_job(lambda: trained(sharded=False), [], first=(1,)).results[1]
    assert not torch.equal(wanted["last.weight"], Net().last.weight)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=CLOSE)


@pytest.mark.thorough
def test_nothing_keeps_a_model_whose_run_is_over() -> None:
    """Torch remembers meshes for as long as a thread lives, and a worker's process may run several times."""

    def trained() -> weakref.ref[Net]:
        model = sharded_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        for _ in er.remaining_epochs_until(1):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        return weakref.ref(model)

    model = contextvars.copy_context().run(trained)
    gc.collect()
    assert model() is None


def test_a_tensor_that_outlives_its_model_says_so() -> None:
    class Nobody:
        def sum_up(self, tensor: torch.Tensor, op: Any) -> None: ...

        def gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None: ...

    group = ShardProcessGroup(0, 2, Nobody())
    with pytest.raises(RuntimeError, match="outlives the model"):
        group.allreduce([torch.ones(1)])


def test_ranks_without_gradients_meet_the_others_on_their_device() -> None:
    """Those of a GPU are exchanged over NCCL, those of a CPU over gloo: a rank on the other one would wait for ever."""
    handed: list[torch.Tensor] = []

    class Gradients:
        def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *splits: Any) -> None:
            handed.extend([output, tensor])

    group = SimpleNamespace(world_size=3, rank=0, communicator=SimpleNamespace(gradients=Gradients()))
    run: Any = SimpleNamespace(
        group=group, consensus=SimpleNamespace(announcer=SimpleNamespace(wait=lambda work: None))
    )
    collectives = ShardCollectives(run, 0)
    collectives.layout = layout_of(3)
    collectives.to_follower([], {2: []}, torch.device("meta"))
    assert [each.device.type for each in handed] == ["meta", "meta"]


@pytest.mark.thorough
def test_numbers_computed_of_rows_are_those_of_the_whole() -> None:
    """Clipping by hand, as code does that was written for whole gradients: all ranks find the same norm."""

    def between(run: Run, step: int) -> None:
        grads = [p.grad for p in run.model.parameters() if p.grad is not None]
        norms.append(sum(grad.detach().norm(2).item() ** 2 for grad in grads) ** 0.5)
        norms.append(run.model.scale.detach().item() + float(bool(torch.isnan(run.model.first.weight).any())))

    norms: list[float] = []
    run(Case(clip=False, between=between), [], (1,))
    wanted, norms[:] = list(norms), []
    run(Case(clip=False, between=between), [], (1, 2, 3))
    assert sorted(norms) == pytest.approx(sorted(wanted * 3), rel=1e-3)
